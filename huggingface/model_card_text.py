"""Model cards: the README.md of an exported model, with metadata for the hub.

The form is that of https://github.com/huggingface/hub-docs/blob/main/modelcard.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FILE_NAME, CURVE = "README.md", "loss_curve.png"

_EMBED = """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".")  # this folder, or its name on the hub
queries = model.encode_query(["..."])
documents = model.encode_document(["...", "..."])
print(model.similarity(queries, documents))
"""

TableRows = Mapping[str, str]
"""Rows of a two-column table: name and value."""


@dataclass(frozen=True)
class AdapterInfo:
    """Base model and embedding size of an exported adapter, for its model card.

    Attributes:
        base: its name on the hub, or its path from the adapter's folder; None: it has none.
        rows: that its embedding needs for the adapter's new tokens; None: those that it has.
    """

    base: str | None
    rows: int | None = None

    @property
    def base_statement(self) -> str:
        """Python statement for the model card that assigns the base model's name to `base`."""
        if self.base is None:
            return 'base = "..."  # the model that the adapter was trained beside'
        is_path = self.base.startswith("..")
        return f"base = folder + {'/' + self.base!r}" if is_path else f"base = {self.base!r}"

    @property
    def load_statements(self) -> list[str]:
        """Python statements for the model card that add the adapter to the base model."""
        resize = [] if self.rows is None else [f"model.resize_token_embeddings({self.rows})"]
        return [*resize, "model = PeftModel.from_pretrained(model, folder)"]


@dataclass(frozen=True)
class ModelCard:
    """Content of a model card, rendered as README.md.

    Attributes:
        name: of the model.
        sequence_to_sequence: whether an encoder reads and a decoder writes.
        base: where the weights came from, for people.
        base_model: its name on the hub; None: it has none.
        datasets: names on the hub of the data it was trained on.
        evaluated_on: name of the data that `metrics` are of.
        metrics: by name, of the validation data.
        prompt, target: templates of what it reads and writes; None: none are known.
        chat: whether it was trained on conversations.
        trained: which parameters were trained.
        data, training: tables.
        sessions: a table for each time that the run was started or continued.
        settings: the whole configuration, as YAML.
        curve: whether there is a picture of the loss.
        adapter: what the folder has an adapter of; None: it has a model.
        num_labels: scores of a classifier; None: a language model.
        embeds: True for a model of embeddings, which sentence-transformers loads.
    """

    name: str
    sequence_to_sequence: bool
    base: str
    base_model: str | None = None
    datasets: Sequence[str] = ()
    evaluated_on: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    prompt: str | None = None
    target: str | None = None
    chat: bool = False
    trained: str = "All parameters were fine-tuned"
    data: TableRows = field(default_factory=dict)
    training: TableRows = field(default_factory=dict)
    sessions: Sequence[TableRows] = ()
    settings: str = ""
    curve: bool = False
    adapter: AdapterInfo | None = None
    num_labels: int | None = None
    embeds: bool = False

    def render_markdown(self) -> str:
        """Render the model card as Markdown."""
        sections = [
            f"# {_escape_markdown(self.name)}",
            self._render_summary(),
            "## Use",
            self._render_usage(),
        ]
        if self.metrics:
            rows = {name: f"{value:.4g}" for name, value in self.metrics.items()}
            sections += ["## Evaluation", f"On {_escape_markdown(self.evaluated_on)}:"]
            sections.append(_render_table(rows, "Metric", "Value"))
        if self.data:
            sections += ["## Data", _render_table(self.data)]
        if self.training:
            sections += ["## Training", _render_table(self.training)]
        if self.curve:
            sections.append(f"![Loss and learning rate over the optimizer steps.]({CURVE})")
        if self.sessions:
            sections += ["## Runs", *map(_render_table, self.sessions)]
        if self.settings:
            sections += [
                "<details><summary>All settings</summary>",
                _code_block("yaml", self.settings),
            ]
            sections.append("</details>")
        return f"---\n{self.render_front_matter()}\n---\n\n" + "\n\n".join(sections) + "\n"

    def render_front_matter(self) -> str:
        """Metadata of the model card for the hub, as YAML."""
        from huggingface_hub import EvalResult, ModelCardData

        task = "text2text-generation" if self.sequence_to_sequence else "text-generation"
        if self.num_labels is not None:
            task = "text-classification"
        library = "peft" if self.adapter else "transformers"
        if self.embeds:
            task, library = "sentence-similarity", "sentence-transformers"
        dataset = self.datasets[0] if self.datasets else self.evaluated_on
        results = [
            EvalResult(
                task, dataset, self.evaluated_on, name, float(value), dataset_split="validation"
            )
            for name, value in self.metrics.items()
        ]
        fields: dict[str, Any] = {
            "base_model": self.base_model,
            "datasets": list(self.datasets) or None,
            "metrics": list(self.metrics) or None,
        }
        card = ModelCardData(
            library_name=library, pipeline_tag=task,
            tags=["lora", "popxl-xla"] if self.adapter else ["popxl-xla"],
            model_name=self.name, eval_results=results or None, **fields,
        )  # fmt: skip
        return str(card.to_yaml())

    def _render_summary(self) -> str:
        if not self.training:
            return f"Weights of {_escape_markdown(self.base)}."
        trained, base = _escape_markdown(self.trained), _escape_markdown(self.base)
        return f"{trained} with PopXL on XLA, from {base}."

    def _tokenizer_statements(self) -> list[str]:
        if not self.chat:
            return [f'inputs = tokenizer({(self.prompt or "...")!r}, return_tensors="pt")']
        is_asked = self.num_labels is None
        return [
            'messages = [{"role": "user", "content": "..."}]',
            "inputs = tokenizer.apply_chat_template(",
            f"    messages, add_generation_prompt={is_asked},"
            ' return_dict=True, return_tensors="pt"',
            ")",
        ]

    def _render_usage(self) -> str:
        if self.embeds:
            return _code_block("python", _EMBED)
        auto_class = "Seq2SeqLM" if self.sequence_to_sequence else "CausalLM"
        use = [
            "tokens = model.generate(**inputs, max_new_tokens=64)",
            "print(tokenizer.decode(tokens[0], skip_special_tokens=True))",
        ]
        arguments = ""
        if self.num_labels is not None:
            auto_class, use = "SequenceClassification", ["print(model(**inputs).logits)"]
            arguments = f", num_labels={self.num_labels}" if self.adapter else ""
        base = "folder" if self.adapter is None else "base"
        lines = [
            *(["from peft import PeftModel"] if self.adapter else []),
            f"from transformers import AutoModelFor{auto_class}, AutoTokenizer",
            "",
            'folder = "."  # this folder, or its name on the hub',
            *([self.adapter.base_statement] if self.adapter else []),
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f"model = AutoModelFor{auto_class}.from_pretrained({base}{arguments})",
            *(self.adapter.load_statements if self.adapter else []),
            *self._tokenizer_statements(),
            *use,
        ]
        code = _code_block("python", "\n".join(lines))
        if self.prompt is None:
            return code
        target = "" if self.target is None else f", and to write {_inline_code(self.target)}"
        if self.num_labels is not None:
            target = ""
        return f"It was trained to read {_inline_code(self.prompt)}{target}.\n\n{code}"


def _render_table(rows: TableRows, *head: str) -> str:
    lines = [f"| {' | '.join(head or ('', ''))} |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {_escape_cell(k)} | {_escape_cell(v)} |" for k, v in rows.items())]
    )


def _escape_cell(text: str) -> str:
    return _escape_markdown(text).replace("|", "\\|").replace("\n", "<br>")


def _escape_markdown(text: str) -> str:
    """Escape Markdown's special characters."""
    for mark in "\\`*_[]<>":
        text = text.replace(mark, f"\\{mark}")
    return text


def _inline_code(text: str) -> str:
    """Format text as inline code, with a fence longer than any backticks in the text."""
    fence = "`" * (_longest_backticks(text) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _code_block(language: str, text: str) -> str:
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _longest_backticks(text: str) -> int:
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == "`" else 0
        longest = max(longest, run)
    return longest
