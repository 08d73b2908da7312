"""config.json of transformers' sequence classifiers: labels, kind of problem, class."""

from __future__ import annotations

from typing import Any

from config.errors import ConfigError
from config.sections import RunConfig
from files.json_files import JsonObject

CLASS_ENDING = "ForSequenceClassification"
PROBLEM, ID2LABEL, LABEL2ID = "problem_type", "id2label", "label2id"

_LM_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_REGRESSION = "regression"
_MULTI_LABEL = "multi_label_classification"
_SINGLE_LABEL = "single_label_classification"


def classifier_config_json_fields(config: RunConfig, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that make a language model's config.json that of its classifier.

    A reward model has no problem type, as TRL's.

    Args:
        hf_config: the language model's.
    """
    training, architecture = config.training, str(hf_config["architectures"][0])
    ending = next(end for end in _LM_ENDINGS if architecture.endswith(end))
    names = [f"LABEL_{i}" for i in range(config.num_labels)]
    problem = {"regression": _REGRESSION}.get(training.objective)
    if training.objective == "classification":
        problem = _MULTI_LABEL if training.multi_label else _SINGLE_LABEL
        if config.data.class_labels is not None:
            names = [name.strip() for name in config.data.class_labels.split(",")]
    return {
        "architectures": [architecture.removesuffix(ending) + CLASS_ENDING],
        ID2LABEL: {str(i): name for i, name in enumerate(names)},
        LABEL2ID: {name: i for i, name in enumerate(names)},
        **({} if problem is None else {PROBLEM: problem}),
    }


def is_classifier(hf_config: JsonObject) -> bool:
    """True if a config.json is that of a sequence classifier."""
    classes = hf_config.data.get("architectures")
    return isinstance(classes, list) and any(str(c).endswith(CLASS_ENDING) for c in classes)


def classifier_run_settings(hf_config: JsonObject) -> dict[str, Any]:
    """Returns the configuration sections of a classifier's config.json: objective and classes.

    Raises:
        ConfigError: the labels are not numbered from 0.
    """
    names = _read_names(hf_config)
    problem = hf_config.data.get(PROBLEM)
    if problem is None:
        problem = _REGRESSION if len(names) == 1 else _SINGLE_LABEL
    if problem == _REGRESSION:
        return {"training": {"objective": "regression"}}
    training: dict[str, Any] = {"objective": "classification"}
    if problem == _MULTI_LABEL:
        training["multi_label"] = True
    return {"training": training, "data": {"class_labels": ",".join(names)}}


def _read_names(hf_config: JsonObject) -> list[str]:
    """Names of a classifier's labels, by number; LABEL_0 and so on where one has a comma."""
    labels = hf_config.data.get(ID2LABEL)
    if labels is None:
        count = hf_config.data.get("num_labels", 2)
        labels = {str(i): f"LABEL_{i}" for i in range(int(count))}
    numbers = {str(i) for i in range(len(labels))} if isinstance(labels, dict) else set()
    if not numbers or {*map(str, labels)} != numbers:
        raise ConfigError(
            f"the model's config.json has {ID2LABEL} that does not number its labels from 0"
        )
    by_number = {str(i): str(name).strip() for i, name in labels.items()}
    names = [by_number[str(i)] for i in range(len(labels))]
    is_usable = all(name and "," not in name for name in names) and len({*names}) == len(names)
    return names if is_usable else [f"LABEL_{i}" for i in range(len(names))]
