"""Rollouts: rows in all their forms, those that break one, and samples of completions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from config.presets import load_config
from data.pipeline import Pipeline
from data.rollout_samples import (
    ADVANTAGES,
    COMPLETION_LENGTHS,
    IS_TRUNCATED,
    OLD_LOGPS,
    REWARDS,
    RolloutSamples,
)
from data.samples import IGNORE_INDEX
from data.sources import DataError
from data.token_outputs import SamplesWithTokenOutputs
from tests.data.test_preferences import KINDS, assistant, user
from tests.small_runs import vocabulary

Rows = list[dict[str, Any]]
ROW: dict[str, Any] = {"prompt": "Anna took", "completion": " the lamp", "reward": 1}


def data_of(tmp_path: Path, preset: str, rows: Rows, objective: str = "grpo",
            length: int = 64, training: Any = (), **data: object) -> Pipeline:  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config_class, shape = KINDS[preset]
    data = {"dataset": "sample", "train": str(file), "validation": None} | data
    if preset != "tiny":
        data |= {"packing": False, "separator": ""}
    sections = {
        "data": data,
        "training": {"objective": objective, **dict(training)},
        "model": vocabulary(config_class, 640) | {"sequence_length": length},
    }
    return Pipeline(load_config(config_class, "finetuning", preset, sections), shape)


def samples_of(*args: Any, **kwargs: Any) -> RolloutSamples:
    samples = data_of(*args, **kwargs).make_training_samples()
    assert isinstance(samples, RolloutSamples)
    return samples


def completions(samples: RolloutSamples) -> list[list[int]]:
    """The labels of each sample's loss tokens."""
    labels = samples.take(np.arange(len(samples)))["labels"]
    return [row[row != IGNORE_INDEX].tolist() for row in labels]


# ---- rows ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", KINDS)
def test_texts_with_rewards(tmp_path: Path, preset: str) -> None:
    rows = [ROW | {"reward": reward} for reward in (3, 1.5, True, None)]
    samples = samples_of(tmp_path, preset, rows, training={"scale_rewards": "none"}.items())
    batch = samples.take(np.arange(len(samples)))
    rewards = batch[REWARDS][batch[COMPLETION_LENGTHS] > 0]
    order = np.argsort(-rewards)
    np.testing.assert_array_equal(rewards[order], [3, 1.5, 1, math.nan])
    advantages = batch[ADVANTAGES][batch[COMPLETION_LENGTHS] > 0][order]
    np.testing.assert_allclose(advantages, [3 - 5.5 / 3, 1.5 - 5.5 / 3, 1 - 5.5 / 3, 0], rtol=1e-6)


def test_a_group_is_that_of_the_row_or_the_prompt(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"reward": 0}, ROW | {"group": 7, "reward": 5},
            ROW | {"prompt": "Ben saw", "group": 7, "reward": 3}]  # fmt: skip
    samples = samples_of(tmp_path, "gptj_tiny", rows, training={"scale_rewards": "none"}.items())
    np.testing.assert_allclose(samples.arrays[ADVANTAGES], [0.5, -0.5, 1, -1])


@pytest.mark.parametrize("as_text", [False, True])
def test_messages_are_rendered_as_they_were_for_the_policy(tmp_path: Path, as_text: bool) -> None:
    """A truncated completion ends before the token that the template ends answers with."""
    completion: Any = "Here." if as_text else [assistant("Here.")]
    row = {"prompt": [user("Where?")], "completion": completion, "reward": 1}
    rows = [row | {"finish_reason": reason} for reason in ("stop", "length")]
    data = data_of(tmp_path, "qwen3_tiny", rows, tokenizer="data/sample/chat_tokenizer")
    assert data.is_chat
    example, _ = data.read_corpus("train").examples
    assert example.prompt == "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    samples = data.make_training_samples()
    assert isinstance(samples, RolloutSamples)
    decode = data.tokenizer.hf_tokenizer.decode
    batch = samples.take(np.arange(len(samples)))
    learned = decode(batch["labels"][batch["labels"] != IGNORE_INDEX])
    assert learned == "Here.<|im_end|>Here."


IDS = {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9, 1], "reward": 1}


@pytest.mark.parametrize("preset", KINDS)
def test_token_ids_are_not_tokenized_again(tmp_path: Path, preset: str) -> None:
    """Log-probabilities lie at their labels, and a completion without an end token is noticed."""
    end = data_of(tmp_path, preset, [IDS]).tokenizer.eos_token_id
    ids = [[8, 9, end], [10, 11]]
    rows = [{**IDS, "completion_ids": i, "logprobs": [-0.5 * x for x in i]} for i in ids]
    samples = samples_of(tmp_path, preset, rows)
    learned = [token for row in completions(samples) for token in row]
    assert sorted(learned) == sorted([*ids[0], *ids[1]])
    assert samples.old_logps is not None
    batch = SamplesWithTokenOutputs(samples, samples.old_logps).take(np.arange(len(samples)))
    in_loss = batch["labels"] != IGNORE_INDEX
    np.testing.assert_array_equal(batch[OLD_LOGPS][in_loss], -0.5 * batch["labels"][in_loss])
    assert not batch[OLD_LOGPS][~in_loss].any()
    truncated = dict(zip(batch[COMPLETION_LENGTHS][:, 0], batch[IS_TRUNCATED][:, 0], strict=True))
    assert truncated[3] == 0
    assert truncated[2] == 1


@pytest.mark.parametrize("preset", KINDS)
def test_a_truncated_completion_has_no_end_token(tmp_path: Path, preset: str) -> None:
    reasons = ("stop", "length")
    rows = [ROW | {"finish_reason": reason, "reward": i} for i, reason in enumerate(reasons)]
    data = data_of(tmp_path, preset, rows)
    samples = data.make_training_samples()
    assert isinstance(samples, RolloutSamples)
    end = data.tokenizer.eos_token_id
    first, second = (r.sequences[0].ids.tolist() for r in samples.rollouts)
    assert first == [*second, end]
    assert samples.arrays[IS_TRUNCATED].tolist() == [0, 1]
    masked = samples_of(tmp_path, preset, rows, "dapo")
    batch = masked.take(np.arange(len(masked)))
    assert sum(bool(row) for row in completions(masked)) == 1
    assert np.count_nonzero(batch[COMPLETION_LENGTHS]) == 2, "it counts all the same"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "completion": "b"}, "rollouts need prompt, completion, reward"),
        ({"completion": "b", "reward": 1}, "rollouts need prompt, completion, reward"),
        ({"prompt_ids": [1], "reward": 1}, "rollouts need prompt_ids, completion_ids, reward"),
        (ROW | {"reward": "good"}, "'reward' holds 'good', but must hold a finite number"),
        (ROW | {"reward": [1]}, "'reward' holds"),
        (ROW | {"reward": "inf"}, "'reward' holds 'inf'"),
        (ROW | {"group": [1]}, "'group' holds [1], but must hold text or a number"),
        (ROW | {"finish_reason": 3}, "'finish_reason' holds 3, but must hold text"),
        (ROW | {"logprobs": [0.5]}, "'logprobs' must hold a list of log-probabilities"),
        (ROW | {"logprobs": [None]}, "'logprobs' must hold a list of log-probabilities"),
        (ROW | {"logprobs": "x"}, "'logprobs' must hold a list of log-probabilities"),
        (ROW | {"logprobs": [-1.0]}, "it has 1 logprobs, but its completion has"),
        (ROW | {"completion": None}, "column 'completion' holds null"),
        (IDS | {"completion_ids": []}, "'completion_ids' holds no token ids"),
        (IDS | {"completion_ids": [1.5]}, "'completion_ids' must hold a list of token ids"),
        (IDS | {"prompt_ids": [-1]}, "'prompt_ids' must hold a list of token ids"),
        (IDS | {"completion_ids": [640]}, "there is a token 640, but the model's tokens are below"),
        (IDS | {"completion_ids": [9] * 70}, "sequence_length is 64: give --sequence_length 72"),
        (ROW | {"completion": "", "finish_reason": "length"}, "the completion is empty"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises((DataError, ConfigError)) as error:
        samples_of(tmp_path, "gptj_tiny", [row, row])
    assert said in str(error.value)
    assert "rows.jsonl" in str(error.value)


def test_logprobs_are_given_for_all_rows_or_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2.*it has no logprobs, but other rows have"):
        samples_of(tmp_path, "gptj_tiny", [IDS | {"logprobs": [-1, -1, -1]}, IDS])


def test_rollouts_of_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="grpo learns from rows of its own"):
        samples_of(tmp_path, "gptj_tiny", [ROW], format="language_modeling")


# ---- samples ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("how", "left"), [("skip", [1, 3]), ("truncate", [1, 3, 40])])
def test_long_rollouts_lose_the_beginning_of_their_prompt(
    tmp_path: Path, how: str, left: list[int]
) -> None:
    """Rewards are compared among all of them."""
    ids = [IDS | {"prompt_ids": [4] * prompt, "completion_ids": [9] * n, "reward": n, "group": "a"}
           for prompt, n in ((5, 1), (5, 3), (40, 40), (5, 70))]  # fmt: skip
    samples = samples_of(tmp_path, "gptj_tiny", ids, on_long_target=how)
    assert sorted(map(len, completions(samples))) == left
    assert samples.truncation_counts.dropped == 4 - len(left)
    rewards = np.asarray([1, 3, 40, 70])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(samples.arrays[ADVANTAGES], expected[: len(left)], rtol=1e-6)


@pytest.mark.parametrize(("how", "left"), [("skip", [1, 3]), ("truncate", [1, 3, 16])])
def test_long_completions_of_encoder_decoders_are_cut(
    tmp_path: Path, how: str, left: list[int]
) -> None:
    ids = [IDS | {"completion_ids": [9] * n, "logprobs": [-1.0 * i for i in range(n)]}
           for n in (1, 3, 70)]  # fmt: skip
    data = data_of(tmp_path, "tiny", ids, on_long_target=how)
    config = replace(
        data.user_config, model=replace(data.user_config.model, decoder_sequence_length=16)
    )
    samples = replace(data, user_config=config).make_training_samples()
    assert isinstance(samples, RolloutSamples)
    assert sorted(map(len, completions(samples))) == left
    assert samples.old_logps is not None
    assert len(samples.old_logps.values) == sum(left)


def test_the_reward_of_leave_one_out_has_a_penalty(tmp_path: Path) -> None:
    """As in TRL: of the sum over tokens; and in whatever order sequences are packed."""
    ids = [IDS | {"completion_ids": [9] * n, "reward": n / 2, "group": n % 2} for n in range(1, 9)]
    samples = samples_of(tmp_path, "gptj_tiny", ids, "rloo", 24, {"beta": 0.5}.items())
    kl = np.random.default_rng(0).normal(size=36)
    penalized = samples.with_kl_penalty(kl)
    batch = penalized.take(np.arange(len(samples)))
    lengths = batch[COMPLETION_LENGTHS][batch[COMPLETION_LENGTHS] > 0].astype(int)
    sums = np.add.reduceat(kl, np.cumsum([0, *lengths[:-1]]))
    rewards = lengths / 2 - 0.5 * sums
    for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        others = (lengths % 2 == length % 2) & (np.arange(8) != index)
        found = batch[ADVANTAGES][batch[COMPLETION_LENGTHS] > 0][index]
        assert found == pytest.approx(reward - rewards[others].mean(), rel=1e-5)


def test_the_digest_depends_on_rewards_and_log_probabilities(tmp_path: Path) -> None:
    rows = [IDS | {"logprobs": [-1, -2, -3]}, IDS | {"logprobs": [-1, -2, -3], "reward": 0}]
    changed = [rows[0] | {"reward": 2}, rows[0] | {"logprobs": [-1, -2, -4]}]
    digests = [samples_of(tmp_path, "gptj_tiny", [row, rows[1]]).digest
               for row in (rows[0], *changed, rows[0])]  # fmt: skip
    assert len(set(digests)) == 3
    assert digests[0] == digests[3]
