"""Names of the fields that `planning.auto_config` can choose if no preset sets them."""

AUTO_FIELDS = (
    "model.precision",
    "model.sequence_length",
    "model.output_length",
    "model.decoder_sequence_length",
    "training.global_batch_size",
    "training.optimizer.learning_rate.maximum",
    "training.optimizer.learning_rate.warmup_proportion",
    "execution.micro_batch_size",
    "execution.data_parallel",
    "execution.tensor_parallel",
    "data.loss_on",
)
