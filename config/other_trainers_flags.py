"""Registry of other trainers' command-line flags, with replacements and hints.

The names are those of transformers' Trainer, TRL, PEFT, LLaMA-Factory, axolotl, torchtune, vLLM,
sentence-transformers and FlagEmbedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from config.lr_schedules import LR_SCHEDULES
from config.objectives import OBJECTIVES

OMIT = "omit"
"""In place of ours: what the value asks for needs no flag."""


@dataclass(frozen=True)
class Flag:
    """Command-line flag of another trainer, with its replacement in this program.

    Attributes:
        names: of the flag, without dashes, separated by spaces.
        replacement: flag of this program; the value goes to its end or replaces `{}`; "": none.
        says: a remark, with commands in backticks; where there is no flag, the reason.
        values: by others' values in small letters ours, or flags with their values; OMIT: none.
            "true" is also that of the flag alone. Where `replacement` takes any value, others pass.
        any_value: values that are not in `values` pass to `replacement`.
        native_values: values of our flag of the same name, which is meant then.
    """

    names: str
    replacement: str = ""
    hint: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    any_value: bool = False
    native_values: tuple[str, ...] = ()

    @property
    def passes_other_values(self) -> bool:
        """True if `replacement` also accepts values of the flag that `values` does not list."""
        return bool(self.replacement) and (self.any_value or not self.values)

    def replacement_for_choice(self, choice: str) -> str:
        """Returns this program's replacement for a value of the flag that `values` lists."""
        whole = choice == OMIT or choice.startswith("--")
        return choice if whole else f"{self.replacement} {choice}".rstrip()

    def replacement_with_value(self, value: str) -> str:
        """Returns this program's replacement flag, followed by the other trainer's value."""
        return (
            self.replacement.format(value)
            if "{" in self.replacement
            else f"{self.replacement} {value}".rstrip()
        )


_ON = {"true": "true", "false": "false"}
_NO_ENGINE = (
    "layers stream through the device; `--data_parallel N` and `--tensor_parallel N` share the work"
)
_PRECISIONS = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
               "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": OMIT,
               "no": "float32"}  # fmt: skip
_SCHEDULES = {name: name for name in LR_SCHEDULES} | {
    "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
_8_BITS = "--training.optimizer.state 8bit_residual8"
_OPTIMIZERS = {"adafactor": "adafactor"} | dict.fromkeys(
    ("adamw", "adamw_torch", "adamw_hf", "adamw_torch_fused", "adamw_torch_xla",
     "paged_adamw_32bit", "paged_adamw"), "adamw"
) | dict.fromkeys(
    ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), _8_BITS
)  # fmt: skip
_DISTILL = "--training.objective distill --training.teacher FOLDER"
_OBJECTIVES = {"sigmoid": "dpo", "nll": "cross_entropy"} | {
    name: name for name, spec in OBJECTIVES.items() if "teacher" not in spec.settings
}
_RATE = "--training.optimizer.learning_rate"
_LORA, _QLORA = "--adapter.rank 8", "--quantization int4 --adapter.rank 8"
_BEST = "`--load RUN/best` takes them"
_KEEP_BEST = "--eval.steps 100 --checkpoint.keep_best loss"

DATA = (
    Flag("train_file train_data data_path dataset_path dataset_name dataset_dir datasets",
         "--data.train"),
    Flag("dataset", "--data.train", "of its own it has sample and mnli",
         native_values=("sample", "mnli")),
    Flag("validation_file eval_file eval_data eval_dataset val_set_size val_size eval_size "
         "test_size", "--data.validation"),
    Flag("dataset_config dataset_config_name dataset_train_split dataset_test_split subset split",
         hint="`--data.train NAME:SUBSET@SPLIT` names both"),
    Flag("max_train_samples max_samples",
         hint="`--epochs 0.1` takes a tenth of the rows, or give fewer rows"),
    Flag("max_eval_samples", "--eval.samples"),
    Flag("max_seq_length max_seq_len max_length cutoff_len model_max_length max_source_length "
         "max_input_length sequence_len seq_length block_size max_model_len", "--sequence_length",
         "of an answer: `--generation.max_tokens N`"),
    Flag("max_target_length max_answer_length val_max_target_length", "--decoder_sequence_length",
         "of a decoder: `--output_length N`"),
    Flag("max_prompt_length max_completion_length truncation_mode",
         hint="`--sequence_length N` limits prompt and answer together; T5 has "
         "`--decoder_sequence_length N` for the answer"),
    Flag("packing sample_packing neat_packing eval_packing eval_sample_packing",
         hint="samples hold several whole texts, which do not see each other "
         "(`--examples_per_sample N`; 1: none); `--data.packing true` joins and cuts a decoder's"),
    Flag("packing_strategy", "--data.packing", values={"wrapped": "true", "bfd": OMIT}),
    Flag("group_by_length", hint="give the lengths of buckets, `--data.length_buckets 64,128`"),
    Flag("padding_free pad_to_multiple_of pad_to_sequence_len pad_to_max_length "
         "length_column_name train_sampling_strategy",
         hint="short texts share a sample, `--examples_per_sample N`"),
    Flag("train_on_inputs train_on_prompt", "--data.loss_on",
         values={"true": "all", "false": "completion"}),
    Flag("completion_only_loss assistant_only_loss", "--data.loss_on",
         values={"true": "completion", "false": "all"}),
    Flag("mask_history", "--data.loss_on", values={"true": "last_turn"}),
    Flag("system_prompt default_system", "--data.system"),
    Flag("chat_template_path", "--data.chat_template"),
    Flag("template chat_template", hint="a tokenizer has its own; `--data.chat_template FILE` is "
         "another"),
    Flag("enable_thinking", "--data.chat_variables", values={
        "true": "'{\"enable_thinking\": true}'", "false": "'{\"enable_thinking\": false}'"}),
    Flag("dataset_text_field text_field text_column field", "--data.target '{{{}}}'",
         "documents have `--data.format language_modeling`"),
    Flag("prompt_column", "--data.prompt '{{{}}}'"),
    Flag("response_column summary_column target_column", "--data.target '{{{}}}'"),
    Flag("source_lang src_lang", "--source_language"),
    Flag("target_lang tgt_lang forced_bos_token", "--target_language"),
    Flag("source_prefix", "--data.prompt '{}{{text}}'"),
    Flag("shuffle_dataset data_shuffle shuffle",
         hint="every epoch has another order, from `--data.seed N`"),
    Flag("data_seed", "--data.seed"),
    Flag("remove_unused_columns label_names",
         hint="columns that no template names are passed over"),
    Flag("dataloader_num_workers dataloader_drop_last dataloader_pin_memory dataloader_in_order "
         "dataloader_persistent_workers dataloader_prefetch_factor overwrite_cache streaming "
         "dataloader_multiprocessing_context preprocessing_num_workers dataset_num_proc "
         "dataset_kwargs dataset_streaming dataset_processes",
         hint="the program reads data by itself"),
)  # fmt: skip

MODEL = (
    Flag("model_name_or_path model_name base_model pretrained_model_name_or_path "
         "base_model_name_or_path", "--model"),
    Flag("tokenizer_name tokenizer_name_or_path tokenizer_path", "--tokenizer"),
    Flag("model_revision revision", hint="`hf download NAME --revision R` makes a folder for "
         "`--model DIR`"),
    Flag("token hub_token use_auth_token hf_token", hint="`hf auth login` or HF_TOKEN gives it"),
    Flag("cache_dir", hint="HF_HOME says where the hub's cache is"),
    Flag("trust_remote_code", hint="code in a model's folder is never run"),
    Flag("model_init_kwargs config_name use_fast_tokenizer low_cpu_mem_usage device_map use_cache",
         hint="`--model NAME` is enough"),
    Flag("new_special_tokens add_special_tokens additional_special_tokens",
         "--model.add_tokens"),
    Flag("model.max_length n_positions", "--model.max_position_embeddings"),
    Flag("model.scaled_head", "--model.scale_decoder_outputs", values=_ON),
    Flag("part_of model.part_of", "--model.multimodal_parent"),
    Flag("rope_scaling", hint="the model's config.json says it"),
    Flag("eos_token pad_token special_tokens", hint="the tokenizer's own count"),
    Flag("router_aux_loss_coef", "--model.router_aux_loss_coef"),
    Flag("bf16", "--precision", values={"true": "bfloat16", "auto": OMIT}),
    Flag("fp16 half", "--precision", values={"true": "float16"}),
    Flag("bf16_full_eval fp16_full_eval pure_bf16", hint="`--precision bfloat16` is that of "
         "training and evaluation"),
    Flag("dtype torch_dtype mixed_precision compute_dtype", "--precision", values=_PRECISIONS),
    Flag("tf32", hint="float32 products are never rounded to TF32"),
    Flag("use_flash_attention_2 flash_attention flash_attn", "--execution.attention",
         values={"true": "fused", "fa2": "fused", "fa3": "fused", "sdpa": "fused", "auto": OMIT,
                 "false": "scores", "disabled": "scores"}),
    Flag("attn_implementation", "--execution.attention", values={
        "flash_attention_2": "fused", "flash_attention_3": "fused", "sdpa": "fused",
        "eager": "scores"}),
    Flag("use_liger_kernel enable_liger_kernel liger_kernel_config use_unsloth torch_compile "
         "torch_compile_backend torch_compile_mode compile enforce_eager",
         hint="XLA compiles every program"),
    Flag("seed_everything random_seed", "--seed"),
    Flag("full_determinism", hint="all random numbers follow from `--seed N`"),
)  # fmt: skip

TRAINING = (
    Flag("lr", "--learning_rate"),
    Flag("lr_scheduler_type lr_scheduler scheduler", f"{_RATE}.function", values=_SCHEDULES),
    Flag("lr_scheduler_kwargs", hint=f"`{_RATE}.num_cycles N`, `{_RATE}.minimum` and "
         f"`{_RATE}.decay_proportion` are these"),
    Flag("min_lr", f"{_RATE}.minimum"),
    Flag("warmup_ratio", "--warmup_proportion"),
    Flag("num_warmup_steps", "--warmup_steps"),
    Flag("optim", "--training.optimizer.name", values=_OPTIMIZERS),
    Flag("optim_args optim_target_modules", hint="--help-all lists what optimizers have"),
    Flag("weight_decay", "--training.optimizer.weight_decay"),
    Flag("adam_beta1", "--training.optimizer.beta1"),
    Flag("adam_beta2", "--training.optimizer.beta2"),
    Flag("adam_epsilon", "--training.optimizer.eps"),
    Flag("max_grad_norm grad_clip clip_grad_norm gradient_clipping",
         "--training.optimizer.gradient_clipping"),
    Flag("num_train_epochs num_epochs n_epochs", "--epochs"),
    Flag("max_steps num_steps max_train_steps", "--steps"),
    Flag("batch_size train_batch_size", "--global_batch_size",
         "on a device at once: `--micro_batch_size N`"),
    Flag("per_device_train_batch_size per_device_eval_batch_size eval_batch_size",
         "--micro_batch_size"),
    Flag("gradient_accumulation_steps",
         hint="it follows from `--global_batch_size N`, `--micro_batch_size N` and "
         "`--data_parallel N`"),
    Flag("auto_find_batch_size", hint="without `--micro_batch_size N` the program chooses it"),
    Flag("average_tokens_across_devices", hint="the loss is the mean over the batch's tokens"),
    Flag("gradient_checkpointing activation_checkpointing enable_activation_checkpointing",
         "--activations",
         values={"true": "recompute", "unsloth": "recompute", "false": "keep"}),
    Flag("gradient_checkpointing_kwargs activation_checkpointing_kwargs",
         hint="`--activations recompute` repeats whole layers"),
    Flag("activation_offloading enable_activation_offloading", hint="activations that do "
         "not fit go to host memory; `--execution.placement host` sends all"),
    Flag("dropout dropout_rate", "--dropout_prob"),
    Flag("disable_dropout", "--dropout_prob", values={"true": "0.0"}),
    Flag("label_smoothing label_smoothing_factor", "--training.label_smoothing"),
    Flag("neftune_noise_alpha neft_alpha", hint="no noise is added to embeddings"),
    Flag("stage", values={"sft": OMIT, "pt": "--data.format language_modeling",
                          "rm": "--training.objective reward",
                          **{n: f"--training.objective {n}" for n in ("dpo", "kto", "orpo")}}),
    Flag("loss_type pref_loss rl", "--training.objective", values=_OBJECTIVES),
    Flag("beta pref_beta rl_beta dpo_beta kto_beta orpo_alpha", "--training.beta"),
    Flag("simpo_gamma", "--training.gamma"),
    Flag("center_rewards_coefficient", "--training.center_rewards_coefficient"),
    Flag("num_labels", hint="the data, or `--data.class_labels`, say how many classes there are"),
    Flag("problem_type", "--training.objective",
         values={"regression": "regression", "single_label_classification": "classification",
                 "multi_label_classification": "classification --training.multi_label true"}),
    Flag("epsilon", "--training.epsilon"),
    Flag("epsilon_high", "--training.epsilon_high"),
    Flag("scale_rewards", "--training.scale_rewards", values={
        "true": "--training.scale_rewards group", "false": "--training.scale_rewards none"}),
    Flag("normalize_advantages", values={"true": "--training.scale_rewards batch", "false": OMIT}),
    Flag("mask_truncated_completions", "--training.mask_truncated_completions", values={
        "true": "--training.mask_truncated_completions true",
        "false": "--training.mask_truncated_completions false"}),
    Flag("importance_sampling_level", values={
        "token": "--training.objective grpo", "sequence": "--training.objective gspo"}),
    Flag("num_iterations", "--epochs"),
    Flag("num_generations num_generations_eval generation_batch_size steps_per_generation "
         "use_vllm vllm_mode reward_funcs reward_weights",
         hint="completions are written and scored elsewhere: `--training.objective grpo` learns "
         "from rows with rewards"),
    Flag("delta top_entropy_quantile entropy_coef use_bias_correction_kl off_policy_mask_threshold "
         "vllm_importance_sampling_correction",
         hint="`--training.objective grpo` and the others are as in their papers"),
    Flag("ref_model ref_model_path ref_model_name_or_path reference_model",
         hint="the reference is the model that training begins with"),
    Flag("teacher teacher_model teacher_model_path teacher_model_name_or_path",
         hint=f"`{_DISTILL}`"),
    Flag("kd_alpha kd_ratio kd_weight", hint=f"`{_DISTILL} --training.distill_weight 0.5`"),
    Flag("sentence_pooling_method pooling_mode", "--training.pooling",
         values={"mean": "mean", "last_token": "last", "lasttoken": "last"}),
    Flag("train_group_size", hint="the texts of a row besides its anchor: "
         "`--training.objective contrastive --training.negatives 7`"),
    Flag("negatives_cross_device gather_across_devices", values={"true": OMIT}),
    Flag("normalize_embeddings", values={"true": OMIT}),
    Flag("kd_temperature", hint=f"`{_DISTILL} --training.temperature 2`"),
    Flag("kd_top_k teacher_top_k", hint=f"`{_DISTILL} --training.top_k 64`"),
    Flag("precompute_ref_log_probs precompute_ref_batch_size",
         hint="the reference always speaks once, before training"),
    Flag("desirable_weight undesirable_weight loss_weights ld_alpha rpo_alpha pref_ftx "
         "f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau sync_ref_model "
         "ref_model_mixup_alpha ref_model_sync_steps reference_free",
         hint="`--training.objective dpo` and the others are as in their papers"),
    Flag("use_cpu no_cuda", "--device cpu", values={"true": ""}),
    Flag("deepspeed fsdp fsdp_config zero_stage accelerator_config parallelism_config "
         "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
         "ddp_backend ddp_timeout local_rank offload_folder ignore_bias_buffers", hint=_NO_ENGINE),
    Flag("num_gpus n_gpu gpus", "--data_parallel"),
    Flag("tensor_parallel_size", "--tensor_parallel"),
    Flag("nproc_per_node num_processes nnodes",
         hint="`python3 -m popdist.run` starts several processes"),
    Flag("torch_empty_cache_steps debug skip_memory_metrics gpu_memory_utilization swap_space",
         hint="the program plans memory before it runs: `--plan` shows it"),
)  # fmt: skip

RUN = (
    Flag("output_dir out_dir save_dir export_dir", "--save",
         "for transformers: `--save-hf DIR`"),
    Flag("overwrite_output_dir fresh", "--overwrite", "it deletes the run that is in `--save DIR`",
         values={"true": ""}),
    Flag("resume resume_from_checkpoint auto_resume_from_checkpoints",
         hint="the same command with the same `--save DIR` continues"),
    Flag("ignore_data_skip restore_callback_states_from_checkpoint",
         hint="a run continues at the sample where it stopped"),
    Flag("save_steps", "--checkpoint.steps"),
    Flag("save_total_limit", "--to_keep"),
    Flag("save_strategy saves_per_epoch",
         hint="a run is saved every 10 minutes, or give `--checkpoint.steps N`"),
    Flag("save_only_model", "--checkpoint.save_optimizer", values={"true": "false"}),
    Flag("save_on_each_node enable_jit_checkpoint save_safetensors",
         hint="checkpoints are safetensors, and a signal saves one"),
    Flag("eval_steps", "--eval.steps"),
    Flag("eval_strategy evaluation_strategy", "--eval.steps 100",
         "an epoch has as many steps as samples over the batch",
         values={"no": OMIT, "steps": "", "epoch": "", "": ""}),
    Flag("evals_per_epoch eval_delay eval_on_start",
         hint="`--eval.steps N` evaluates every N steps"),
    Flag("include_for_metrics batch_eval_metrics eval_accumulation_steps prediction_loss_only "
         "eval_do_concat_batches eval_use_gather_object compute_accuracy",
         hint="`--eval.metrics rouge_l` says which"),
    Flag("predict_with_generate", hint="evaluation writes answers by itself"),
    Flag("load_best_model_at_end", _KEEP_BEST, _BEST, values={"true": ""}),
    Flag("metric_for_best_model", "--eval.steps 100 --checkpoint.keep_best", _BEST,
         values={"eval_loss": _KEEP_BEST, "eval_accuracy":
                 "--eval.steps 100 --checkpoint.keep_best accuracy"}, any_value=True),
    Flag("greater_is_better", hint="each metric has its own direction"),
    Flag("early_stopping_patience", "--eval.steps 100 --eval.patience"),
    Flag("logging_steps logging_strategy logging_first_step logging_dir log_level "
         "logging_nan_inf_filter include_num_input_tokens_seen log_on_each_node log_level_replica "
         "log_every_n_steps plot_loss disable_tqdm",
         hint="every step is in the run's metrics.jsonl and loss_curve.png"),
    Flag("report_to", values={"wandb": "--wandb", "tensorboard": "--tensorboard", "none": OMIT,
                              "all": "--wandb --tensorboard"}),
    Flag("run_name wandb_run_name wandb_run", "--wandb --wandb-name"),
    Flag("project", "--wandb --wandb-project"),
    Flag("wandb_entity wandb_watch wandb_log_model trackio_space_id trackio_bucket_id "
         "trackio_static_space_id", hint="`--wandb` takes wandb's own environment variables, such "
         "as WANDB_ENTITY"),
    Flag("stall stall_timeout", "--watchdog_seconds"),
    Flag("do_train do_eval do_predict",
         hint="run_finetuning.py trains, run_validation.py evaluates, run_generation.py writes"),
    Flag("push_to_hub hub_model_id hub_private_repo hub_strategy hub_always_push hub_revision",
         hint="`--save-hf DIR` writes a model, which `hf upload` takes"),
)  # fmt: skip

ADAPTERS = (
    Flag("lora_r lora_rank r", "--adapter.rank"),
    Flag("lora use_lora use_peft peft", _LORA, values={"true": ""}),
    Flag("finetuning_type",
         values={"lora": _LORA, "full": OMIT, "freeze": "--training.trainable NAMES"}),
    Flag("lora_alpha", "--adapter.alpha"),
    Flag("lora_dropout", "--adapter.dropout"),
    Flag("lora_target lora_target_modules target_modules", "--adapter.targets",
         values={"all": "all-linear"}, any_value=True),
    Flag("lora_target_linear", "--adapter.targets", values={"true": "all-linear"}),
    Flag("use_rslora peft_use_rslora", f"{_LORA} --adapter.rslora", values=_ON),
    Flag("use_dora peft_use_dora", f"{_LORA} --adapter.dora", values=_ON),
    Flag("modules_to_save lora_modules_to_save additional_target", "--adapter.modules_to_save"),
    Flag("rank_pattern", hint="`--adapter.rank_pattern k_proj=4,o_proj=16` is it"),
    Flag("alpha_pattern", hint="`--adapter.alpha_pattern k_proj=4,o_proj=16` is it"),
    Flag("adapter", "--adapter.load", values={"lora": _LORA, "qlora": _QLORA}, any_value=True),
    Flag("adapter_name_or_path lora_model_dir", "--adapter.load"),
    Flag("exclude_modules layers_to_transform layers_pattern layer_replication",
         hint="`--adapter.targets` takes a regular expression for whole names"),
    Flag("unfrozen_parameters", "--training.trainable"),
    Flag("trainable_token_indices", f"{_LORA} --adapter.trainable_tokens"),
    Flag("freeze_trainable_layers freeze_extra_modules", hint="`--training.trainable NAMES` and "
         "`--training.frozen NAMES` take patterns"),
    Flag("task_type lora_task_type peft_type auto_mapping peft_version inference_mode "
         "fan_in_fan_out lora_fan_in_fan_out ensure_weight_tying runtime_config",
         hint="the model says it"),
    Flag("lora_target_parameters target_parameters", "--adapter.target_parameters"),
    Flag("bias lora_bias "
         "init_lora_weights loftq_config eva_config corda_config lora_ga_config velora_config "
         "alora_invocation_tokens use_qalora qalora_group_size monteclora_config megatron_config "
         "megatron_core use_bdlora arrow_config kasa_config loraplus_lr_ratio use_galore use_badam "
         "use_apollo", hint="--help-all lists what adapters have"),
    Flag("qlora", _QLORA, values={"true": ""}),
    Flag("load_in_4bit", "--quantization int4", "in training with `--adapter.rank 8`",
         values={"true": ""}),
    Flag("load_in_8bit", "--quantization int8", "in training with `--adapter.rank 8`",
         values={"true": ""}),
    Flag("quantization_bit quantize", "--quantization", "in training with "
         "`--adapter.rank 8`", values={
        "4": "int4", "8": "int8", "int4": "int4", "int8": "int8", "none": OMIT}),
    Flag("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_use_double_quant quantization_method "
         "bnb_4bit_compute_dtype bnb_4bit_quant_storage quantization_type",
         hint="`--quantization int4` rounds to nearest, with a scale and a bias for 64 inputs"),
    Flag("execution.packed", "--execution.quantized_cache"),
    Flag("frozen_weights execution.frozen_weights", "--quantization"),
)  # fmt: skip

GENERATION = (
    Flag("max_new_tokens max_tokens generation_max_length", "--generation.max_tokens"),
    Flag("generation_num_beams beam_width", "--num_beams"),
    Flag("do_sample", "--search", values={"true": "sample", "false": "greedy"}),
    Flag("length_penalty", "--generation.length_penalty"),
    Flag("raw", "--no_template", values={"true": ""}),
    Flag("stop stop_sequences", "--stop_strings"),
    Flag("min_p typical_p epsilon_cutoff presence_penalty frequency_penalty min_new_tokens "
         "num_return_sequences best_of early_stopping stop_token_ids",
         hint="--help-all lists what chooses tokens"),
)  # fmt: skip

FLAGS = (*DATA, *MODEL, *TRAINING, *RUN, *ADAPTERS, *GENERATION)
