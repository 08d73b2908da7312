"""Tables are derived from modules: they say what they said when families wrote them down, and a
program has what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelling.layers import LMHeadLoss
from modelling.model_family import get_family
from modelling.weights import Weight, WeightMap, WeightMapping, WeightsError
from popxl_addons import NamedTensors
from sessions.generation import GenerationSession
from sessions.training import TrainingSession
from tests.modelling.gptj.hf import small_config
from tests.modelling.weight_map_summary import cases, digest

WRITTEN_DOWN = json.loads(Path(__file__).with_name("weight_map_summary.json").read_text("utf-8"))


def test_tables_are_those_that_families_wrote_down() -> None:
    """Digests of all that a table says but the paths of variables."""
    found = {name: digest(config) for name, config in cases()}
    assert found == WRITTEN_DOWN


def test_a_variable_without_a_mapping_or_the_reverse_is_refused() -> None:
    row = WeightMapping("a.weight", (Weight("a.weight", (2,)),))
    weight_map = WeightMap({"layer.0": (row,)})

    def program(*names: str) -> dict[str, NamedTensors]:
        tree = NamedTensors.from_dict(dict.fromkeys(names, 1))  # type: ignore[arg-type]
        return {"layer.0": NamedTensors(fwd=tree)}

    weight_map.check_complete(program("a.weight", "a.product.scale"))
    with pytest.raises(WeightsError, match=r"layer\.0\.b\.weight has no mapping"):
        weight_map.check_complete(program("a.weight", "b.weight"))
    with pytest.raises(WeightsError, match=r"layer\.0\.a\.weight, of the weight map, is not in"):
        weight_map.check_complete(program())


@pytest.mark.parametrize("session", [TrainingSession, GenerationSession])
def test_a_module_reached_by_two_paths_is_found(session, monkeypatch: pytest.MonkeyPatch) -> None:
    """In silence, its weights would be zeros in one of the two."""
    build = LMHeadLoss.__init__

    def twice(self: LMHeadLoss, *args: object, **kwargs: object) -> None:
        build(self, *args, **kwargs)  # type: ignore[arg-type]
        self.again = self.lm_head

    config = small_config()
    weight_map = get_family(config).weight_map(config)
    monkeypatch.setattr(LMHeadLoss, "__init__", twice)
    monkeypatch.setattr(
        "modelling.model_family.ModelFamily.weight_map", lambda self, config: weight_map
    )
    with pytest.raises(WeightsError, match="head.*(again|lm_head)"):
        session(config)
