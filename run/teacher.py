"""The teacher of a distillation: another model, whose outputs over a run's samples are stored.

The teacher has a family, sizes, adapters and quantization of its own, and the run's devices,
precision and sample lengths. Its weights are streamed through the devices, as in an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from config.errors import ConfigError
from config.process_checks import check_same_on_all_processes
from config.sections import RunConfig
from data.pipeline import Pipeline
from data.samples import Samples
from data.token_outputs import SamplesWithTokenOutputs
from data.tokenizer import Tokenizer
from files.formatting import format_path, format_value
from files.run_folder import RunFolder
from huggingface.hub import load_tokenizer
from huggingface.model_folders import read_hf_directory
from huggingface.pretrained import get_local_folder
from modelling.model_family import get_family
from modelling.phases.teacher_head import TeacherHead
from planning.hardware.memory_check import check_lower_bound
from planning.teacher_config import make_teacher_head, teacher_config, teacher_objective_and_dtype
from run.frozen_outputs import (
    FrozenModel,
    hidden_states_kind,
    json_sha256,
    top_tokens_kind,
)
from run.frozen_outputs_file import remove_stale_drafts
from run.known_digests import KnownDigests
from run.weight_checks import DigestCheckedTensors, check_digests
from run.weight_loading import has_steps, load_weights
from terminal.screen import is_first_process


@dataclass(frozen=True)
class Teacher:
    """The teacher of a run, with its stored outputs.

    Attributes:
        config: the student's configuration.
        model: the teacher.
    """

    config: RunConfig
    model: FrozenModel

    @classmethod
    def for_run(
        cls,
        config: RunConfig,
        folder: RunFolder,
        data: Pipeline,
        previous: RunFolder | None = None,
    ) -> Teacher | None:
        """Returns the teacher of a run; None if its objective needs none.

        Args:
            folder: of the run, for the teacher's outputs.
            data: the run's, whose tokenizer is compared with the teacher's.
            previous: folder of the run that this one resumes, if it is another one.

        Raises:
            UserError: there is no such model, or it has another vocabulary.
        """
        if config.training.objective != "distill":
            return None
        of_teacher, tokenizer_name = teacher_config(config)
        make_teacher_head(config, of_teacher)  # its errors come before the pass
        _check_vocabulary(config, of_teacher, data.tokenizer, tokenizer_name)
        check_lower_bound(of_teacher)
        location = Path(config.training.teacher_cache or folder.teacher_folder)
        weights, sha256 = _hashed_weights(of_teacher, location)
        check_same_on_all_processes({"digest of the teacher": sha256})
        model = FrozenModel(
            "the teacher",
            of_teacher,
            sha256,
            lambda: weights,
            location,
            None if previous is None else previous.teacher_folder,
        )
        return cls(config, model)

    def extend_samples(self, samples: Samples) -> Samples:
        """Add the teacher's outputs, stored or computed, to samples; collective."""
        training, vocab_size = self.config.training, self.config.model.output_vocab_size
        if training.top_k is None:
            kind = hidden_states_kind(
                teacher_objective_and_dtype(self.config, self.model.config)[1]
            )
        else:
            kind = top_tokens_kind(training.top_k, training.rest_temperature, vocab_size)
        return SamplesWithTokenOutputs(samples, self.model.outputs(samples, kind))

    @property
    def teacher_head(self) -> TeacherHead | None:
        """The teacher's head that the student's program holds; None if it holds none."""
        return make_teacher_head(self.config, self.model.config, self.model.weights)

    def remove_drafts(self) -> None:
        """Delete unfinished files of outputs that no process is writing."""
        if self.config.training.teacher_cache is None and is_first_process():
            remove_stale_drafts(self.model.folder)


def _hashed_weights(teacher: RunConfig, folder: Path) -> tuple[DigestCheckedTensors, str]:
    """Returns a teacher's weights and their digest, which is stored in a folder."""
    weight_map, known = get_family(teacher).weight_map(teacher), None
    names = [weight.name for weight in weight_map.weights]
    load = str(teacher.checkpoint.load)
    if not has_steps(load) and teacher.adapter.load is None:
        files = read_hf_directory(get_local_folder(load)).paths
        known = KnownDigests.for_files(folder, [names, teacher.model.to_dict()], files)
    start = load_weights(teacher, weight_map)
    weights = check_digests(
        start.tensors, start.source, known=None if known is None else known.read()
    )
    digests = dict(weights.digests(names))
    if known is not None:
        known.write(digests)
    return weights, json_sha256(digests)


def _check_vocabulary(
    config: RunConfig, teacher: RunConfig, tokenizer: Tokenizer, name: str | None
) -> None:
    """Raises ConfigError unless a teacher knows the student's tokens by the same numbers.

    Args:
        name: of the teacher's tokenizer.
    """
    which = f"training.teacher {format_path(str(config.training.teacher))}"
    advice = "distillation compares probabilities of tokens: take models of one vocabulary"
    student_ids = tokenizer.hf_tokenizer.get_vocab()
    rows, needed = teacher.model.vocab_size, tokenizer.required_vocab_size
    teacher_ids = {} if name is None else load_tokenizer(name).get_vocab()
    by_id = {number: token for token, number in teacher_ids.items()}
    for token, number in sorted(student_ids.items(), key=lambda item: item[1]):
        other = teacher_ids.get(token)
        if teacher_ids and other != number and (other is not None or number in by_id):
            there = format_value(by_id.get(number)) if other is None else f"number {other}"
            raise ConfigError(
                f"{which} has another vocabulary: {format_value(token)}, number {number} of the "
                f"student, is {'not known' if other is None else there} there; {advice}"
            )
    if needed > rows:
        raise ConfigError(f"{which} has {rows} tokens, but the student {needed}; {advice}")
    top_k = config.training.top_k
    if top_k is not None and top_k > min(rows, config.model.vocab_size):
        raise ConfigError(
            f"training.top_k {top_k} must be at most the number of tokens, "
            f"{min(rows, config.model.vocab_size)}"
        )
    if teacher.model.training_start_token != config.model.training_start_token:
        raise ConfigError(
            f"{which} begins answers with another token than the student: take a teacher of the "
            "student's kind"
        )
