"""Training in any number of processes; run by test_processes.

    python processes.py FOLDER CASE...

A case is PRESET-DP-TP, or PRESET+LENGTHS-DP-TP with buckets of lengths. Process 0 writes
FOLDER/PROCESSES/CASE.json: losses, gradient norms, the loss of an evaluation and digests of
weights; all processes together save FOLDER/PROCESSES/CASE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import popdist
from checkpoints import CheckpointStore, load_checkpoint
from checkpoints.safetensors_files import sha256_of_array
from config.families import config_class_of_preset
from config.presets import load_preset, merge_over
from config.sections import RunConfig
from data.loader import Loader
from modelling.model_family import get_family
from modelling.weights import without_optimizer_state
from sessions.generation import GenerationSession
from sessions.loss_evaluation import LossSession
from sessions.training import TrainingSession

STEPS, RATE = 3, 1e-2


def config_of(case: str) -> RunConfig:
    """A model of a layer, with two micro-batches on each copy."""
    model, dp, tp = case.rsplit("-", 2)
    preset, _, lengths = model.partition("+")
    data = load_preset("finetuning", preset)
    changes = {
        "model": {"layers": 1, "hidden_size": 16, "attention": {"heads": 4}, "sequence_length": 8},
        # Without clipping: the norm is a sum of four terms, whose order would be in all weights.
        "training": {
            "global_batch_size": 2 * int(dp), "steps": STEPS,
            "optimizer": {"gradient_clipping": None},
        },
        "execution": {
            "micro_batch_size": 1, "data_parallel": int(dp), "tensor_parallel": int(tp),
            "device": "cpu",
        },
    }  # fmt: skip
    if preset == "tiny":
        changes["model"] |= {"d_ff": 16, "dropout_prob": 0.1}
        changes["model"]["attention"]["d_kv"] = 4
    if lengths:
        changes["data"] = {"length_buckets": lengths}
    data = merge_over(data, changes)
    return config_class_of_preset(data, preset).from_dict(data)


def train(case: str, folder: Path) -> dict[str, object]:
    """Train a few steps, evaluate, and save; what was found."""
    config = config_of(case)
    family = get_family(config)
    samples = family.sample_format.make_random_samples(config, 16, None)
    loader = Loader.from_config(config, samples)
    model = TrainingSession(config)
    model.write(family.weight_map(config).init_weights(0))
    with model, CheckpointStore(folder / case) as store:
        results = [model.run([loader.next_batch()], [RATE], i)[0] for i in range(STEPS)]
        store.save(STEPS, model.tensors(), {}, wait=False)  # in the background
        store.wait()
        weights = dict(without_optimizer_state(model.tensors()))
    found: dict[str, object] = {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "digests": {name: sha256_of_array(array) for name, array in weights.items()},
    }
    if case.endswith("2-2"):
        losses = LossSession(config)
        losses.write(load_checkpoint(folder / case).tensors)
        with losses:
            found["evaluated"] = losses.compute(samples).mean
        found["answers"] = generated(config, load_checkpoint(folder / case).tensors)
    assert all(np.isfinite(array).all() for array in weights.values())
    return found


def generated(config: RunConfig, weights: Mapping[str, np.ndarray]) -> list[list[int]]:
    """Greedy answers to five prompts, which do not fill the last run of the program."""
    model = GenerationSession(config)
    input_ids = np.random.default_rng(0).integers(1, 32, (5, config.model.sequence_length))
    model.write(weights)
    with model:
        return model.generate(
            input_ids.astype(np.int32), np.ones_like(input_ids, np.int32)
        ).tolist()


def main(folder: str, *cases: str) -> None:
    """Run the cases, one after the other."""
    own = Path(folder) / str(popdist.getNumInstances())
    for case in cases:
        found = train(case, own)
        assert all(other == found for other in popdist.all_gather_object(found)), "processes differ"
        if popdist.getInstanceIndex() == 0:
            (own / f"{case}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    popdist.init()
    main(*sys.argv[1:])
