# %% [markdown]
# # Fine-tuning a model, step by step
#
# What `run_finetuning.py` does, one part at a time: configuration, plan, data, program,
# training, where the time goes, evaluation, answers. It runs offline on a CPU, in about a minute.
# Run it as a script, `python3 -m docs.walkthrough`, or cell by cell in an editor that knows `# %%`.

# %%
from __future__ import annotations

from config.presets import load_config
from config.t5 import T5Config
from data.loader import Loader
from data.pipeline import Pipeline
from modelling.model_family import get_family
from planning.hardware.machines import machine
from planning.report import make_report
from planning.requirements import finetuning_requirements
from run.evaluation.evaluator import Evaluator
from sessions.generation import GenerationSession
from sessions.training import TrainingSession

# %% [markdown]
# ## The configuration
#
# A preset, with values of our own laid over it. Every field is checked when it is built.

# %%
config = load_config(
    T5Config,
    "finetuning",
    "tiny",
    {
        "model": {"layers": 1, "hidden_size": 64, "d_ff": 64, "dropout_prob": 0.0},
        "training": {"global_batch_size": 32},
        "execution": {"micro_batch_size": 16, "device": "cpu"},
        "eval": {"samples": 64, "metrics": "loss,perplexity"},
    },
)
print(f"{config.gradient_accumulation} micro-batches of {config.execution.micro_batch_size}")

# %% [markdown]
# ## What it needs
#
# The plan is read off the program. It takes no devices and no weights, for any size of model.

# %%
requirements = finetuning_requirements(config)
plan = make_report("walkthrough", requirements, machine("laptop"))
print(
    f"{requirements.parameters:,} parameters, "
    f"{requirements.plan.host_bytes / 1e6:.1f} MB of host memory"
)
for row in sorted(plan.rows, key=lambda row: -row.part.flops)[:3]:
    print(f"{row.phase} {row.direction}: {row.part.flops / 1e6:.1f} MFLOP")

# %% [markdown]
# ## The data
#
# The task's templates make prompts and targets of rows; the family makes tokens of them. The loader
# deals global batches, in an order that follows from the seed.

# %%
family = get_family(config)
data = Pipeline(config, family.sample_format)
samples = data.make_training_samples()
loader = Loader(samples, config.training.global_batch_size, config.model.seed)
batch = loader.next_batch()
print({name: array.shape for name, array in batch.items()})
print(data.tokenizer.decode(batch["input_ids"][:1])[0])

# %% [markdown]
# ## The program
#
# Building it compiles it. The schedule is what the host does in a step: it loads a layer's weights,
# asks the devices to run a segment of the layer's graph, and stores what comes out.

# %%
model = TrainingSession(config)
print("\n".join(str(model.session.schedule).splitlines()[:8]))

# %% [markdown]
# ## Training
#
# Weights and optimizer state are on the devices, or in host memory for them, while the model is
# entered. They have the names that they have in Hugging Face's models.

# %%
model.write(dict(family.weight_map(config).init_weights(config.model.seed)))
losses = []
with model:
    for step in range(20):
        (result,) = model.run([loader.next_batch()], [2e-3], step)
        losses.append(result.loss)
    with model.session.timing(synchronize=True) as timing:
        model.run([loader.next_batch()], [2e-3], step + 1)
    weights = model.read(optimizer=False)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# %% [markdown]
# ## Where the time goes
#
# With `timing(synchronize=True)` the host waits for every load, segment and store, so that each
# phase has a time of its own. `--profile` writes all of it as a table.

# %%
slowest = sorted(timing.parts.items(), key=lambda item: -item[1].seconds)[:3]
for label, part in slowest:
    print(f"{label}: {part.seconds / timing.seconds:.0%} of the step")

# %% [markdown]
# ## Evaluation
#
# Loss and perplexity come from the forward phases. With `accuracy` among the metrics, the evaluator
# would also compile a program that generates, as the next cell does.

# %%
metrics = Evaluator(config).evaluate(weights, quiet=True).metrics
print({name: round(value, 3) for name, value in metrics.items()})

# %% [markdown]
# ## An answer
#
# After so few steps it is one of the labels at best.

# %%
prompt = "mnli hypothesis: Nina slept. premise: Nina slept in the kitchen."
fitted, encoded = data.make_prompts([prompt])
writer = GenerationSession(fitted)
writer.write(weights)
with writer:
    tokens = writer.generate(encoded.input_ids, encoded.mask)
print(data.tokenizer.decode(tokens))
