"""Root section of the configuration: model, data and run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from config.adapter import NEW
from config.adapter import Adapter as Adapter
from config.base import ConfigSection
from config.errors import ConfigError, ContradictionError
from config.length_buckets import check_length_buckets
from config.memory_lower_bound import ITEM_BYTES, check_fits_any_machine
from config.model import EmbeddingConfig as EmbeddingConfig
from config.model import ModelSection, QuantConfig
from config.model import NestedModelSection as Model
from config.model import TiedEmbeddingConfig as TiedEmbeddingConfig
from config.optimizer_state import MASTER_WEIGHT, RESIDUAL_SLOTS, StateSlot
from config.optimizer_state import Adafactor as Adafactor
from config.run import FP8 as FP8
from config.run import Checkpoint as Checkpoint
from config.run import Evaluation as Evaluation
from config.run import Execution as Execution
from config.run import Generation as Generation
from config.task import CausalLMData, SegmentsData, Seq2SeqData
from config.task import Data as Data
from config.training import LearningRate as LearningRate
from config.training import Optimizer as Optimizer
from config.training import Training as Training
from files.formatting import format_value

MAX_REPLICAS = 2**14
FUSED_FROM = 2**20
"""Scores of a head from which on attention is fused everywhere: `popxl.ops.attention`."""


@dataclass(frozen=True)
class RunConfig(ConfigSection):
    """Root of the configuration. Model families narrow the types of `family` and `model`."""

    family: str = ""
    """The model family."""

    model: ModelSection = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    adapter: Adapter = field(default_factory=Adapter)
    execution: Execution = field(default_factory=Execution)
    fp8: FP8 = field(default_factory=FP8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    data: Data = field(default_factory=Data)
    eval: Evaluation = field(default_factory=Evaluation)
    generation: Generation = field(default_factory=Generation)

    embeds_texts: ClassVar[bool] = True
    """True if sentence-transformers has the model without its head or its decoder."""

    published_tokenizer: ClassVar[str] = ""
    """Tokenizer of the family's published models, a name of the hub."""

    @property
    def adapter_targets(self) -> str:
        """Default of `adapter.targets`: query and value projections, as in PEFT."""
        return "q_proj,v_proj"

    @property
    def trained_tokens(self) -> tuple[int, ...]:
        """Token ids in `adapter.trainable_tokens`, whose embedding rows are trained."""
        asked = self.adapter.trainable_tokens
        if asked == NEW:
            return self.model.embedding_rows_to_initialize()
        if asked is None:
            return ()
        from config.row_ranges import parse_row_ranges

        return parse_row_ranges(asked, "adapter.trainable_tokens")

    @property
    def gradient_accumulation(self) -> int:
        """Number of micro-batches per optimizer step on each replica."""
        return self.training.global_batch_size // self._micro_batch_samples

    @property
    def gradient_scaling(self) -> float:
        """Scale of stored gradients: accumulated micro-batches times the loss scale."""
        return self.execution.loss_scaling * self.gradient_accumulation

    @property
    def best_metric(self) -> str | None:
        """Metric that selects the best checkpoint; None if none is tracked."""
        return self.checkpoint.keep_best or ("loss" if self.eval.patience else None)

    @property
    def micro_batches_per_pass(self) -> int | Literal["auto"]:
        """`execution.micro_batches_per_pass`; all, if the loss compares them."""
        configured = self.execution.micro_batches_per_pass
        needs_all = configured == "auto" and self.training.needs_whole_batch
        return self.gradient_accumulation if needs_all else configured

    @property
    def num_experts(self) -> int:
        """Number of experts of a mixture-of-experts layer; 0 without experts."""
        return 0

    @property
    def can_group_experts(self) -> bool:
        """True if a layer's experts can be split into groups that are loaded in turn."""
        return self.num_experts > 1 and not self.execution.expert_parallel

    def num_expert_weights(self) -> int:
        """Returns the number of expert weights in a layer."""
        return 0

    @property
    def answers_per_example(self) -> int:
        """Number of answers in an example: 2 for preference objectives, else 1."""
        return 2 if self.training.learns_preferences else 1

    @property
    def texts_per_example(self) -> int:
        """Number of texts of an example that follow each other in a sample.

        An encoder reads the prompt of two answers once.
        """
        if self.training.row_type == "contrastive":
            return self.training.texts_per_row
        if self.training.row_type == "compared":
            return 2
        return 1 if isinstance(self.data, Seq2SeqData) else self.answers_per_example

    @property
    def max_examples_per_sample(self) -> int:
        """Maximum number of examples that share a sample."""
        data = self.data
        return data.examples_per_sample if isinstance(data, Seq2SeqData | SegmentsData) else 1

    @property
    def max_texts_per_sample(self) -> int:
        """Maximum number of texts that share a sample of a decoder-only model or of an encoder."""
        return self.max_examples_per_sample * self.texts_per_example

    @property
    def max_sequences_per_sample(self) -> int:
        """Maximum number of token sequences that share a sample of the decoder."""
        return 1 if isinstance(self.data, Seq2SeqData) else self.max_texts_per_sample

    @property
    def uses_model_tokenizer(self) -> bool:
        """True if the run uses the tokenizer that the model was published with."""
        tokenizer, load = self.data.tokenizer, str(self.checkpoint.load)
        return tokenizer is None or os.path.realpath(tokenizer) == os.path.realpath(load)

    @property
    def has_frozen_weights(self) -> bool:
        """True if at least one weight is frozen."""
        return self.training.has_frozen_weights or self.adapter.rank > 0

    @property
    def rounds_stochastically(self) -> bool:
        """True if 16-bit weights and optimizer state are rounded stochastically.

        By default where no float32 master copy or residual keeps the rounding error.
        """
        wanted = self.training.stochastic_rounding
        if wanted is None:
            loses = self.model.precision != "float32" and self.master_weight_slot is None
            return loses or self.training.optimizer.state == "bfloat16"
        return wanted

    @property
    def master_weight_slot(self) -> StateSlot | None:
        """State slot of a 16-bit weight's float32 copy or residual; None without one."""
        if self.model.precision == "float32":
            return None
        if self.execution.master_weights:
            return MASTER_WEIGHT
        return RESIDUAL_SLOTS.get(self.training.optimizer.state)

    def optimizer_slots(self, rank: int, is_float32: bool = False) -> tuple[StateSlot, ...]:
        """Returns the state slots of a weight with `rank` axes, without the step counter.

        Args:
            is_float32: the variable is float32, whatever the model's precision.
        """
        slots = self.training.optimizer.state_slots(rank)
        more = None if is_float32 else self.master_weight_slot
        return slots if more is None else (*slots, more)

    @property
    def has_classifier(self) -> bool:
        """True if transformers has a classifier of this kind of model, and it is built here."""
        return False

    @property
    def num_labels(self) -> int:
        """Number of scores that a classifier gives a sequence."""
        labels = self.data.class_labels
        if self.training.objective != "classification":
            return 1
        return 2 if labels is None else len(labels.split(","))

    @property
    def ties_lm_head(self) -> bool:
        """True if the LM head shares the embedding's weight."""
        return bool(self.model.tie_word_embeddings)

    @property
    def num_vocab_matrices(self) -> int:
        """Number of weights with a row per token: the embedding, and a head of its own."""
        return 1 if self.ties_lm_head or self.training.head != "lm" else 2

    @property
    def can_defer_update(self) -> bool:
        """True if updates deferred to the next step round as immediate updates do.

        The random numbers are those of a run of the program: all its updates must be of one step.
        """
        return self.execution.device_iterations == 1 or not self.rounds_stochastically

    @property
    def num_replicas(self) -> int:
        """Number of devices: the replication factor of the IR."""
        return self.execution.data_parallel * self.execution.tensor_parallel

    @property
    def _micro_batch_samples(self) -> int:
        return self.execution.micro_batch_size * self.execution.data_parallel

    @property
    def _concurrent_samples(self) -> int:
        """Number of samples whose activations exist at a time, over all replicas."""
        return self._micro_batch_samples if self.model.eval else self.training.global_batch_size

    def min_bytes(self) -> dict[str, int]:
        """Returns lower bounds on the memory of a run in bytes, over all devices, by content.

        Families add their own.
        """
        m, e = self.model, self.execution
        item = ITEM_BYTES[m.precision]
        samples = self._concurrent_samples
        tokens = samples * m.sequence_length
        answers = e.device_iterations * samples * getattr(self.data, "examples_per_sample", 1)
        some = m.eval or self.has_frozen_weights  # trained may be as little as a norm
        kept = 1 if some else m.num_hidden_layers
        elements = self.min_num_weights()
        return {
            "the weights": elements * (m.quant.bits if m.quant else 8 * item) // 8,
            "gradients and moments": 0 if some else elements * self._min_state_bytes(),
            "the activations": kept * tokens * m.hidden_size * item,
            "the attention scores": self._attention_score_bytes(),
            "the inputs of a run": e.device_iterations * tokens * 4,
            "the answers of a run": answers * getattr(m, "decoder_sequence_length", 0) * 4,
        }

    def _min_state_bytes(self) -> int:
        """Returns the bytes per weight of its gradient and element-wise optimizer state."""
        slots = self.optimizer_slots(2)
        state = sum(slot.itemsize for slot in slots if slot.per == "element")
        return ITEM_BYTES[self.training.gradient_dtype] + state

    def min_num_weights(self) -> int:
        """Returns a lower bound on the number of weights; model families override it."""
        m = self.model
        return m.hidden_size * (m.vocab_size + m.num_hidden_layers)

    @property
    def num_attention_heads(self) -> int:
        """Heads of a layer's attention, in an encoder-decoder those of the encoder."""
        return self.tensor_parallel_sizes().get(self.model.field_path("num_attention_heads"), 1)

    def _attention_score_bytes(self) -> int:
        """Returns the float32 bytes of attention scores that exist at a time on all devices.

        0 where attention is fused.
        """
        m, e = self.model, self.execution
        is_long = m.sequence_length**2 >= FUSED_FROM
        if e.num_query_chunks == 1 and (
            e.attention == "fused" or (e.attention == "auto" and is_long)
        ):
            return 0
        queries = m.sequence_length // e.num_query_chunks
        positions = self.num_attention_heads * queries * m.sequence_length
        return self._micro_batch_samples * positions * 4

    def validate(self) -> None:
        check_fits_any_machine(self.min_bytes())
        if self.num_replicas > MAX_REPLICAS:
            raise ConfigError(
                f"execution.data_parallel {self.execution.data_parallel} × tensor_parallel "
                f"{self.execution.tensor_parallel} must be at most {MAX_REPLICAS:,} devices"
            )
        self._check_rounding()
        self._check_experts()
        self._check_trained_weights()
        self._check_trained_tokens()
        self._check_contrastive()
        self._check_execution()
        check_length_buckets(self)
        # Generation has no optimizer step, so any batch will do.
        if not self.model.eval and self.training.global_batch_size % self._micro_batch_samples:
            raise ConfigError(
                f"training.global_batch_size {self.training.global_batch_size} must be divisible "
                f"by execution.micro_batch_size {self.execution.micro_batch_size} × "
                f"execution.data_parallel {self.execution.data_parallel} = "
                f"{self._micro_batch_samples}"
            )
        if self.execution.attention_serialisation != "auto":
            self.require_multiple(
                "model.sequence_length", self.model.sequence_length, "attention_serialisation"
            )
        if not self.model.eval and self.execution.micro_batches_per_pass != "auto":
            self.require_multiple(
                "the gradient accumulation", self.gradient_accumulation, "micro_batches_per_pass"
            )
            self._check_whole_batch()
        for name, value in self.tensor_parallel_sizes().items():
            self.require_multiple(name, value, "tensor_parallel")
        if self.model.quant is not None:
            self._check_quantization(self.model.quant)

    def _check_contrastive(self) -> None:
        is_contrastive = self.training.row_type == "contrastive"
        if self.eval.corpus is not None and not is_contrastive:
            raise ContradictionError(
                f"eval.corpus is for contrastive, not for {self.training.objective}: leave it out",
                {"eval.corpus": None},
                "training.objective",
            )
        if is_contrastive and self.data.format not in (None, "prompt_completion"):
            raise ContradictionError(
                "contrastive rows are texts: leave out data.format",
                {"data.format": None},
                "training.objective",
            )
        if is_contrastive and not self.embeds_texts:
            raise ConfigError(
                "training.objective contrastive is for decoder-only models and T5's encoder, not "
                f"for {self.family}"
            )
        if self.training.bidirectional and isinstance(self.data, Seq2SeqData):
            raise ConfigError(
                "training.bidirectional is for decoder-only models: an encoder's tokens attend to "
                "all others anyway"
            )

    def _check_whole_batch(self) -> None:
        per_pass, count = self.execution.micro_batches_per_pass, self.gradient_accumulation
        if self.training.needs_whole_batch and per_pass != count:
            raise ContradictionError(
                f"training.objective {self.training.objective} compares all samples of a step, so "
                f"a pass has all its {count} micro-batches, but execution.micro_batches_per_pass "
                f"is {per_pass}: leave it out",
                {"execution.micro_batches_per_pass": "auto"},
                "training.objective",
            )

    def _check_experts(self) -> None:
        groups = self.execution.expert_groups
        if groups > 1 and (not self.num_experts or self.num_experts % groups):
            raise ConfigError(
                f"execution.expert_groups {groups} must divide the number of a layer's "
                f"experts, {self.num_experts}"
            )
        if self.execution.expert_parallel and not self.num_experts:
            raise ConfigError(
                "execution.expert_parallel is for models with experts, but this one has none"
            )
        if self.execution.expert_parallel and groups > 1:
            raise ContradictionError(
                "execution.expert_parallel and execution.expert_groups exclude each other",
                {"execution.expert_parallel": False, "execution.expert_groups": 1},
            )

    def _check_trained_tokens(self) -> None:
        asked, rows = self.adapter.trainable_tokens, self.model.vocab_size
        if asked is None:
            return
        if not self.adapter.rank:
            raise ConfigError(
                "adapter.trainable_tokens trains rows beside adapters: set adapter.rank"
            )
        if max(self.trained_tokens, default=0) >= rows:
            raise ConfigError(
                f"adapter.trainable_tokens is {format_value(asked)}, but must be rows below "
                f"{self.model.field_path('vocab_size')} {rows}"
            )

    def _check_trained_weights(self) -> None:
        if self.training.head == "classifier" and not self.has_classifier:
            kind = getattr(self.model, "model_type", self.family)
            raise ConfigError(
                f"training.objective {self.training.objective} needs a classifier's head, which "
                f"models of the kind {kind} do not have: take a T5, a GPT-J or another model with "
                "a decoder alone"
            )
        if self.training.row_type and isinstance(self.data, CausalLMData) and self.data.packing:
            raise ContradictionError(
                f"data.packing joins texts, but {self.training.objective} learns from whole ones: "
                "set data.packing false",
                {"data.packing": False},
                "training.objective",
            )
        if self.fp8.enabled and self.fp8.recipe == "delayed" and self.has_frozen_weights:
            raise ContradictionError(
                "fp8.recipe delayed learns its scales in backward passes, which frozen layers may "
                "not have: where some are frozen, set fp8.recipe current",
                {"fp8.recipe": "current"},
                *("training.trainable", "training.frozen", "adapter.rank"),
            )
        if self.fp8.head and self.ties_lm_head:
            tied = self.model.field_path("tie_word_embeddings")
            raise ContradictionError(
                f"fp8.head is for heads with weights of their own, but {tied} is true",
                {"fp8.head": False},
                tied,
            )
        if self.adapter.rank and self.training.frozen and not self.training.trainable:
            raise ContradictionError(
                "training.frozen takes from training.trainable where adapters are trained, but "
                "that names nothing: leave both out, or name what is trained besides adapters",
                {"training.frozen": None},
                "adapter.rank",
            )

    def _check_execution(self) -> None:
        if self.execution.update == "deferred" and not self.can_defer_update:
            raise ContradictionError(
                "execution.update deferred with stochastic rounding needs "
                f"execution.device_iterations 1, not {self.execution.device_iterations}: set it, "
                "or update to end",
                {"execution.update": "auto", "execution.device_iterations": 1},
                "training.stochastic_rounding",
            )
        if self.execution.host_memory is not None and self.execution.disk is None:
            raise ConfigError(
                "execution.host_memory limits what the state may take: name a folder for the rest "
                "in execution.disk"
            )
        if self.checkpoint.keep_best is not None and self.eval.steps is None:
            raise ConfigError(
                "checkpoint.keep_best needs evaluations while training: set eval.steps"
            )

    def _check_rounding(self) -> None:
        optimizer, random = self.training.optimizer, self.training.stochastic_rounding
        state = "training.optimizer.state"
        ways = {
            "execution.master_weights": (self.execution.master_weights, False),
            state: (optimizer.is_8bit, "float32"),
            "training.stochastic_rounding": (random, None),
        }
        chosen = [way for way, (on, _) in ways.items() if on]
        if len(chosen) > 1 and self.model.precision != "float32":
            one, other = (f"{w} {optimizer.state}" if w == state else w for w in chosen[:2])
            raise ContradictionError(
                f"{one} and {other} are two ways to keep small updates of 16-bit weights: choose "
                "one of them",
                {way: ways[way][1] for way in chosen},
            )
        if optimizer.state == "bfloat16" and random is False:
            raise ContradictionError(
                "training.optimizer.state bfloat16 needs training.stochastic_rounding: without it, "
                "moments lose small changes",
                {state: "float32", "training.stochastic_rounding": None},
            )
        if optimizer.name == "adafactor" and optimizer.state == "bfloat16":
            raise ContradictionError(
                "training.optimizer.state bfloat16 is for adamw's moments: leave it float32 for "
                "adafactor, whose second moments are a row and a column",
                {state: "float32"},
                "training.optimizer.name",
            )

    def check_generates_text(self) -> None:
        """Raises ConfigError for a model without a language model's head, which writes nothing."""
        if self.training.head != "lm":
            raise ConfigError(
                f"this model was made for {self.training.objective} and writes no text: "
                "run_validation.py evaluates it, run_export.py writes it for transformers"
            )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Returns the dimensions that tensor parallelism must divide, by dotted path.

        Model families add more. The vocabulary is padded.
        """
        return {self.model.field_path("hidden_size"): self.model.hidden_size}

    def linear_input_sizes(self) -> dict[str, int]:
        """Returns the input features of the linear layers on one device, by name.

        Model families add more.
        """
        return {self.model.field_path("hidden_size"): self.model.hidden_size}

    def _check_quantization(self, quant_config: QuantConfig) -> None:
        if not (self.model.eval or self.adapter.rank):
            raise ConfigError(
                f"model.quantization {self.model.quantization} is for generation and adapters: "
                "weights in so few bits cannot be trained"
            )
        if self.fp8.enabled:
            raise ContradictionError(
                f"model.quantization {self.model.quantization} and fp8.enabled exclude each other: "
                "a weight is held in few bits or multiplied in 8",
                {"model.quantization": None, "fp8.enabled": False},
            )
        size, in_a_word = quant_config.group_size, 16 // quant_config.bits
        for name, value in self.linear_input_sizes().items():
            if value % size or size % in_a_word:
                raise ConfigError(
                    f"model.quantization_group_size {size} must be a multiple of "
                    f"{in_a_word} that divides {name}, {value}"
                )

    def check_key_value_heads(self, name: str, heads: int) -> None:
        """Raises `ConfigError` unless tensor parallelism can share out key-value heads.

        Several devices hold the same head where there are fewer heads than devices.
        """
        parts, optimizer = self.execution.tensor_parallel, self.training.optimizer
        if max(heads, parts) % min(heads, parts):
            raise ConfigError(
                f"{name} {heads} and execution.tensor_parallel {parts}: one must be a multiple of "
                "the other"
            )
        if parts > heads and not optimizer.registry_entry.allows_shard_replicas:
            raise ConfigError(
                f"{optimizer.name} with execution.tensor_parallel {parts} above {name} {heads} is "
                "not supported: take adamw"
            )

    def require_multiple(self, name: str, value: int, parallelism_field: str) -> None:
        """Raises `ConfigError` unless a field's value is divisible by a field of `execution`.

        Args:
            parallelism_field: the name of the field of `execution` that says into how many parts.
        """
        parts = getattr(self.execution, parallelism_field)
        if value % parts:
            raise ConfigError(
                f"{name} {value} must be divisible by execution.{parallelism_field} {parts}"
            )
