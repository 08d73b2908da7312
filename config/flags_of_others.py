"""Flags that other trainers have, and what stands for them here.

The names are those of transformers' Trainer, TRL, LLaMA-Factory, axolotl, torchtune and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from config.errors import ConfigError
from config.metrics import OBJECTIVES
from files.shown import shown_name


@dataclass(frozen=True)
class Flag:
    """A setting as others name it.

    Attributes:
        names: of the flag, without dashes, separated by spaces.
        ours: the flag that stands for it, with a value where that is always the same; "": none.
        says: what is to be known of it.
        values: what becomes of its values; others have none. None: they stay as they are.
    """

    names: str
    ours: str = ""
    says: str = ""
    values: Mapping[str, str] | None = None


_ON = {"true": "true", "false": "false"}
_NO_ENGINE = "layers stream through the device; --data_parallel, --tensor_parallel split the work"
_PRECISIONS = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
               "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # fmt: skip
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant",
              "constant_with_warmup": "constant"}  # fmt: skip
_OPTIMIZERS = {"adafactor": "adafactor"} | dict.fromkeys(
    ("adamw", "adamw_torch", "adamw_hf", "adamw_torch_fused"), "adamw"
)
_OBJECTIVES = {"sigmoid": "dpo"} | {name: name for name in OBJECTIVES}
_RATE = "--training.optimizer.learning_rate"

FLAGS = (
    Flag("model_name_or_path model_name base_model pretrained_model_name_or_path", "--model"),
    Flag("tokenizer_name tokenizer_name_or_path", "--tokenizer"),
    Flag("train_file train_data data_path dataset_path dataset_name", "--data.train"),
    Flag("validation_file eval_file eval_data val_set_size val_size", "--data.validation"),
    Flag("output_dir out_dir save_dir", "--save"),
    Flag("overwrite_output_dir", "--fresh", values={"true": ""}),
    Flag("resume resume_from_checkpoint", says="the same command with the same --save goes on"),
    Flag("lr", "--learning_rate"),
    Flag("lr_scheduler_type lr_scheduler", f"{_RATE}.function", values=_SCHEDULES),
    Flag("min_lr", f"{_RATE}.minimum"),
    Flag("warmup_ratio", "--warmup_proportion"),
    Flag("optim", "--training.optimizer.name", values=_OPTIMIZERS),
    Flag("adam_beta1", "--training.optimizer.beta1"),
    Flag("adam_beta2", "--training.optimizer.beta2"),
    Flag("adam_epsilon", "--training.optimizer.eps"),
    Flag("max_grad_norm grad_clip", "--training.optimizer.gradient_clipping"),
    Flag("num_train_epochs num_epochs n_epochs", "--epochs"),
    Flag("max_steps num_steps", "--steps"),
    Flag("batch_size train_batch_size", "--global_batch_size"),
    Flag("per_device_train_batch_size per_device_eval_batch_size", "--micro_batch_size"),
    Flag(
        "gradient_accumulation_steps",
        says="it follows from --global_batch_size, --micro_batch_size and --data_parallel",
    ),
    Flag("gradient_checkpointing", "--activations",
         values={"true": "recompute", "false": "keep"}),
    Flag("max_seq_length max_seq_len cutoff_len model_max_length max_source_length "
         "sequence_len block_size", "--sequence_length"),
    Flag("max_target_length", "--decoder_sequence_length", "of a decoder: --output_length"),
    Flag("sample_packing", "--data.packing", values=_ON),
    Flag("train_on_inputs", "--data.loss", values={"true": "all", "false": "answers"}),
    Flag("completion_only_loss assistant_only_loss", "--data.loss",
         values={"true": "answers", "false": "all"}),
    Flag("system_prompt default_system", "--data.system"),
    Flag("bf16", "--precision", values={"true": "bfloat16"}),
    Flag("fp16", "--precision", values={"true": "float16"}),
    Flag("dtype torch_dtype mixed_precision", "--precision", values=_PRECISIONS),
    Flag("use_flash_attention_2 flash_attention flash_attn", "--execution.attention",
         values={"true": "fused", "fa2": "fused", "false": "scores"}),
    Flag("attn_implementation", "--execution.attention",
         values={"flash_attention_2": "fused", "sdpa": "fused", "eager": "scores"}),
    Flag("save_steps", "--checkpoint.steps"),
    Flag("save_total_limit", "--to_keep"),
    Flag("save_strategy", says="a run is saved every 10 minutes, or every --checkpoint.steps"),
    Flag("eval_steps", "--evaluation.steps"),
    Flag("eval_strategy evaluation_strategy", says="--evaluation.steps N evaluates while training"),
    Flag("metric_for_best_model", "--checkpoint.keep_best",
         "the name of a metric", values={"loss": "loss", "eval_loss": "loss"}),
    Flag("load_best_model_at_end",
         says="--checkpoint.keep_best loss keeps the best weights, which --load RUN/best takes"),
    Flag("early_stopping_patience", "--evaluation.patience"),
    Flag("logging_steps logging_strategy", says="every step is in the run's metrics.jsonl"),
    Flag("report_to", "", "--wandb and --tensorboard log there, too"),
    Flag("run_name wandb_run_name", "--wandb-name"),
    Flag("do_train do_eval do_predict",
         says="run_finetuning.py trains, run_validation.py evaluates, run_generation.py writes"),
    Flag("push_to_hub hub_model_id",
         says="--save-hf DIR writes a model, which Hugging Face's `hf upload` takes"),
    Flag("lora_r lora_rank", "--adapter.rank"),
    Flag("lora use_lora use_peft peft finetuning_type", says="--adapter.rank 8 trains adapters"),
    Flag("lora_alpha", "--adapter.alpha"),
    Flag("lora_dropout", "--adapter.dropout"),
    Flag("lora_target lora_target_modules", "--adapter.targets"),
    Flag("adapter adapter_name_or_path", "--adapter.load"),
    Flag("qlora load_in_4bit", "--quantisation int4", values={"true": ""}),
    Flag("load_in_8bit", "--quantisation int8", values={"true": ""}),
    Flag("quantization_bit", "--quantisation", values={"4": "int4", "8": "int8"}),
    Flag("frozen_weights execution.frozen_weights", "--quantisation"),
    Flag("loss_type pref_loss rl", "--training.objective", values=_OBJECTIVES),
    Flag("beta pref_beta rl_beta", "--training.beta"),
    Flag("simpo_gamma", "--training.gamma"),
    Flag("deepspeed fsdp zero_stage", says=_NO_ENGINE),
    Flag("num_gpus n_gpu gpus", "--data_parallel"),
    Flag("nproc_per_node num_processes", says="python3 -m popdist.run starts several processes"),
    Flag("use_cpu no_cuda", "--device cpu", values={"true": ""}),
    Flag("dataloader_num_workers preprocessing_num_workers",
         says="the program reads data by itself"),
    Flag("label_smoothing label_smoothing_factor neftune_noise_alpha",
         says="nothing stands for it"),
    Flag("max_new_tokens max_tokens", "--generation.max_tokens"),
    Flag("num_beams", "--beams"),
    Flag("do_sample", "--search", values={"true": "sample", "false": "greedy"}),
    Flag("stop stop_sequences", "--stop_strings"),
)  # fmt: skip

_BY_NAME = {name: flag for flag in FLAGS for name in flag.names.split()}


def check_flags(arguments: Sequence[str]) -> None:
    """Raise ConfigError, which names ours, if there are flags of others on a command line."""
    answers = list(dict.fromkeys(_answers(arguments)))
    if answers:
        raise ConfigError("; ".join(answers))


def _answers(arguments: Sequence[str]) -> Iterator[str]:
    """A clause for each of them."""
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        typed, equals, value = argument.partition("=")
        flag = _BY_NAME.get(typed[2:].replace("-", "_")) if typed.startswith("--") else None
        if flag is not None:
            given = value if equals else None if following.startswith("--") else following
            yield _answer(typed, flag, given)


def _answer(typed: str, flag: Flag, value: str | None) -> str:
    """What stands for a flag with a value; `value`: None: it has none."""
    if not flag.ours:
        return f"{typed} is not there: {flag.says}"
    given = "" if value is None else f" {shown_name(value, 60)}"
    says = flag.says and f" ({flag.says})"
    if flag.values is None:
        return f"{typed}{given} is {flag.ours}{given}{says}"
    ours = flag.values.get("true" if value is None else value.lower())
    if ours is not None:
        return f"{typed}{given} is {flag.ours} {ours}".rstrip()
    if given.lower() == " false":
        return f"{typed}{given} is left out"
    return f"{typed} is {flag.ours}, which has: {', '.join(_choices(flag))}{says}"


def _choices(flag: Flag) -> list[str]:
    """The values of ours that others' stand for."""
    return [value for value in dict.fromkeys((flag.values or {}).values()) if value]


def rows() -> Iterator[tuple[str, str]]:
    """What documents show: others' flags, and ours."""
    for flag in FLAGS:
        choices = _choices(flag)
        value = f" {'|'.join(choices)}" if choices else ""
        ours = [f"`{flag.ours}{value}`"] if flag.ours else []
        yield (
            ", ".join(f"`--{n}`" for n in flag.names.split()),
            ": ".join([*ours, *filter(None, [flag.says])]),
        )
