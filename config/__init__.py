"""Run configuration: typed sections, presets in YAML, and a command-line flag for every field.

Why this is not tyro, jsonargparse or pydantic-settings: flags are only known after a first pass
over the command line, since the model family, which `--load`, `--model` or `--config` decides,
defines the fields. Values come from sources of different priority, and a value must remember its
source: contradictions are resolved in favor of the higher one, and fields without a source are
planned. Errors are one sentence with file, line and a suggestion, also for other trainers' flags.
On top of a library, `config_sources`, `other_trainers_flags`, `user_yaml` and `errors` would
remain; it would save the parsing in `base`, `values` and `flags`, which imports in a fraction of a
second (`python3 -X importtime -c "import terminal.command_line"`).
"""
