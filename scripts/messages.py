"""Every message that dualform raises, read off the source: the registry behind the pages of refusals and other errors.

A message is found where an error of `dualform.errors` (or one derived from it) is made. Texts are followed through
constants, local variables and functions of the same module; whatever is only known when the error is raised becomes a
placeholder in angle quotes. Convention has it that a message's first sentence says what came and the rest what to do.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "dualform"
NOT_EXACT = "Parameter ‹name› cannot be recorded exactly: {}"
OBJECTIONS = {
    "gradient_history": {"": NOT_EXACT},
    "gradient_check": {"": NOT_EXACT},
    "joint_gradients": {"": NOT_EXACT},
    "continuity": {
        "was taken out": "Layer ‹layer› is not the recorded one any more: ‹its module› {}.",
        "was exchanged": "Layer ‹layer› is not the recorded one any more: ‹its module› {}.",
        "was ": "The state of ‹optimizer› for parameter ‹name› {}: the recorded gradients do not lead to it.",
        "is ": "The state of ‹optimizer› for parameter ‹name› {}: the recorded gradients do not lead to it.",
        "counts ": "The state of ‹optimizer› for parameter ‹name› {}: the recorded gradients do not lead to it.",
    },
}
"""Modules of recording/ whose texts are reasons; by how a text begins, the message that other modules make of it."""
SHORTEST = 20  # characters of a text in one of these modules that is a reason; what is shorter is a key or a name
REFUSALS = ("RefusedError", "CoverageError", "OptimizerError")

THEMES: Mapping[str, tuple[str, ...]] = {
    "The model and its layers": ("watch", "hooks", "elementwise_modules", "parameter_facts", "step_recorder"),
    "The optimizer": ("optimizers", "recorded_optimizers", "unwrap", "scalar"),
    "Weights that something else changed": ("changes", "continuity"),
    "Gradients": ("step_preparation", "gradient_history", "gradient_check", "joint_gradients"),
    "What is kept": ("group_labels", "share_fold", "share_writer", "record_to_folder", "writer"),
    "Several processes": ("agreement", "joint_preparation", "joint_start", "process_group", "processes"),
    "Trainers": ("transformers", "lightning", "accelerate", "carried_columns", "resuming"),
}
"""Headings of the page of refusals, and the modules under each; a refusal of any other module is under the last one."""
OTHER_THEME = "Anything else"

REMEDIES = {
    "Another process of this training": "Look for the error of that process, which says what to do.",
    "Some of the processes skip this step": (
        "Decide together, for example from a flag that is summed over the processes."
    ),
    "The processes of this training would continue": "Let every process load the checkpoint of the same step.",
    "its gradient is not finite": (
        "Lower the learning rate, clip by norm, or use a gradient scaler, which skips the step."
    ),
    "its gradient was changed between backward and step": (
        "Clip by norm, not by value, move noise into the data, and make a regulariser the optimizer's weight_decay."
    ),
    "no recorded pattern explains its gradient": (
        "Call layers as modules, begin to record before the forward, and compile inside of the recording."
    ),
    "the recorded patterns do not explain its gradient": (
        "Make a regulariser the optimizer's weight_decay, call layers as modules, or record the layer's keys only."
    ),
    "its gradient at the step is not one factor": "Wrap the whole model in DistributedDataParallel, and clip by norm.",
    "some processes cleared the gradient": "Call optimizer.zero_grad() in all processes or in none.",
    "record() got": "Give the optimizer itself, or several in a list.",
    "is one group more than": (
        "Record with Shares(groups=...) that are more, with coarser groups (dualform.bins), or with rest=True, which "
        "puts later groups into one."
    ),
    "only numbers can be cut into bins": "Group by the column itself, or annotate a number.",
    "the recorded gradients do not lead to it": (
        "Load an optimizer's state before record(); or end this recording and start another one, in a new folder, "
        "after the change."
    ),
    "is not the recorded one any more": (
        "End this recording before the exchange, and start another one, in a new folder, after it."
    ),
    "joined ‹name› after the recording began": "Give every parameter to the optimizer before record().",
}
"""What to do about refusals whose own text does not say it, by some words of them."""

DETOURS = re.compile(r"‹(exchanged|broken|error|found)›( ‹[^›]*›)?[.:]? ?(?![a-z ]* cannot)|.*‹objection›")
"""How messages begin that only pass on another module's text, which is listed by itself."""


@dataclass(frozen=True, slots=True)
class Message:
    """What an error says.

    Attributes:
        error: the error's class.
        module: the module that makes it, as a path below src/dualform.
        line: where.
        text: what it says, with placeholders in angle quotes.
    """

    error: str
    module: str
    line: int
    text: str

    @property
    def cause(self) -> str:
        """What came: the message's first sentence."""
        return _parted(self.text)[0]

    @property
    def remedy(self) -> str:
        """What to do: the message's other sentences, or what stands for it in `REMEDIES`."""
        own = _parted(self.text)[1]
        written = [text for words, text in REMEDIES.items() if words in self.text and text not in own]
        return " ".join(filter(None, (own, *written)))

    @property
    def theme(self) -> str:
        """The heading under which a refusal is listed."""
        name = Path(self.module).stem
        return next((theme for theme, modules in THEMES.items() if name in modules), OTHER_THEME)


def error_classes() -> dict[str, str]:
    """Return the docstring of every error class, by its name; classes derived from one count as that one's."""
    tree = ast.parse((SOURCE / "errors.py").read_text(encoding="utf-8"))
    return {
        node.name: (ast.get_docstring(node) or "").split("\n")[0]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def messages() -> list[Message]:
    """Return every message, in the order of the modules."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    classes = {name: name for name in error_classes()}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in classes:
                        classes.setdefault(node.name, classes[base.id])
    constants: dict[str, ast.expr] = {}
    for tree in trees.values():
        constants |= dict(_constants(tree))
    found = []
    for path, tree in trees.items():
        module = path.relative_to(SOURCE).as_posix()
        reader = _Reader(tree, {**constants, **dict(_constants(tree))})
        for call, around in reader.calls():
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in classes and call.args:
                for text in reader.texts(call.args[0], around):
                    found.append(Message(classes[name], module, call.lineno, _clean(text)))
        if path.stem in OBJECTIONS and path.parent.name == "recording":
            for line, reason in reader.reasons(classes):
                frames = (frame for begin, frame in OBJECTIONS[path.stem].items() if reason.startswith(begin))
                if (frame := next(frames, None)) is not None:
                    found.append(Message("RefusedError", module, line, _clean(frame.format(reason))))
    return [message for message in found if not _is_detour(message.text)]


def refusal_sections() -> str:
    """Return every refusal as Markdown: a heading for each theme, and for each refusal its cause and its remedy."""
    refusals = [message for message in messages() if message.error in REFUSALS]
    lines = []
    for theme in (*THEMES, OTHER_THEME):
        here = dict.fromkeys((message.cause, message.remedy) for message in refusals if message.theme == theme)
        if here:
            lines += [
                f"### {theme}",
                "",
                *(f"- **{_escaped(cause)}** {_escaped(remedy)}" for cause, remedy in here),
                "",
            ]
    return "\n".join(lines)


def message_sections() -> str:
    """Return every other message as Markdown: by error class, folded up."""
    rest = [message for message in messages() if message.error not in REFUSALS]
    lines = []
    for name, meaning in error_classes().items():
        here = dict.fromkeys((message.cause, message.remedy) for message in rest if message.error == name)
        if here:
            lines += [f'??? note "{name}: {len(here)} messages"', f"    {meaning}", ""]
            lines += [*(f"    - **{_escaped(cause)}** {_escaped(remedy)}".rstrip() for cause, remedy in here), ""]
    return "\n".join(lines)


class _Reader:
    """Follows the texts of one module."""

    def __init__(self, tree: ast.Module, constants: Mapping[str, ast.expr]) -> None:
        self._tree = tree
        self._constants = constants
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def calls(self) -> Iterator[tuple[ast.Call, ast.AST]]:
        """Yield every call of the module with the function around it."""
        yield from _calls(self._tree, self._tree)

    def reasons(self, classes: Mapping[str, str]) -> Iterator[tuple[int, str]]:
        """Yield every text that is neither a docstring nor part of an error."""
        errors = [call for call, _ in self.calls() if isinstance(call.func, ast.Name) and call.func.id in classes]
        seen = {id(node) for call in errors for node in ast.walk(call)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                seen.add(id(node.value))
            if id(node) in seen or not isinstance(node, ast.Constant | ast.JoinedStr):
                continue
            seen |= {id(part) for part in ast.walk(node)}
            for text in self.texts(node, self._tree):
                if len(text) >= SHORTEST and " " in text:
                    yield node.lineno, text

    def texts(self, node: ast.expr, around: ast.AST, depth: int = 0) -> list[str]:
        """Return what an expression can say; one placeholder where that is only known when it runs."""
        again = depth + 1
        if isinstance(node, ast.Constant):
            return [node.value if isinstance(node.value, str) else f"‹{node.value}›"]
        if isinstance(node, ast.JoinedStr):
            return _joined([self.texts(part, around, again) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            inner = node.value
            worded = isinstance(inner, ast.IfExp) and all(
                isinstance(one, ast.Constant | ast.JoinedStr) for one in (inner.body, inner.orelse)
            )
            if worded or isinstance(inner, ast.Name | ast.Subscript):
                return self.texts(inner, around, again)
            return [_placeholder(inner)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _joined([self.texts(node.left, around, again), self.texts(node.right, around, again)])
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, around, again), *self.texts(node.orelse, around, again)]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("rstrip", "format")
        ):
            return self.texts(node.func.value, around, again)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            table = self._constants.get(node.value.id)
            if isinstance(table, ast.Dict):
                return [text for value in table.values for text in self.texts(value, around, again)]
        if isinstance(node, ast.Name) and depth < 4:
            given = [
                part.value
                for part in ast.walk(around)
                if isinstance(part, ast.Assign)
                and any(isinstance(t, ast.Name) and t.id == node.id for t in part.targets)
            ]
            worded = [value for value in given if isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp)]
            if worded and not isinstance(around, ast.Module):
                return [text for value in worded for text in self.texts(value, around, again)]
            if isinstance(self._constants.get(node.id), ast.Constant | ast.JoinedStr):
                return self.texts(self._constants[node.id], around, again)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in self._functions
            and depth < 2
        ):
            function = self._functions[node.func.id]
            returned = [part.value for part in ast.walk(function) if isinstance(part, ast.Return) and part.value]
            return [text for value in returned for text in self.texts(value, function, again)]
        return [_placeholder(node)]


def _calls(node: ast.AST, around: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inside = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else around
        if isinstance(child, ast.Call):
            yield child, inside
        yield from _calls(child, inside)


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the module's constants that are texts."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values = node.value.values if isinstance(node.value, ast.Dict) else [node.value]
            if values and all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in values):
                yield node.targets[0].id, node.value


def _is_detour(text: str) -> bool:
    """Say whether a message has no words of its own, or only passes on a text that is listed by itself."""
    own = re.sub(r"‹[^›]*›", "", text)
    return "is zero although" in text or DETOURS.match(text) is not None or len(re.findall(r"\w+", own)) < 2


def _joined(parts: list[list[str]]) -> list[str]:
    """Return every way to join one text of each part."""
    whole = [""]
    for part in parts:
        whole = [before + text for before in whole for text in part]
    return whole


def _placeholder(node: ast.expr) -> str:
    """Return a name in angle quotes for what is only known when an error is raised."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    if not names or isinstance(node, ast.IfExp | ast.BoolOp | ast.BinOp | ast.Subscript):
        return "‹…›"
    name = names[-1] if isinstance(node, ast.Call) and len(names) > 1 else names[0]
    if isinstance(node, ast.Call) and node.args:
        name = next((part for part in ast.walk(node.args[0]) if isinstance(part, ast.Name | ast.Attribute)), name)
    text = name.attr if isinstance(name, ast.Attribute) else name.id
    return f"‹{text.strip('_').replace('_', ' ')}›"


def _clean(text: str) -> str:
    """Return a message without quotes around placeholders, doubled placeholders and line breaks."""
    text = re.sub(r"\{(\w+)(?:[:!][^}]*)?\}", r"‹\1›", text)
    text = re.sub(r"[‹]{2,}([^›]*)[›]{2,}", r"‹\1›", text)
    return re.sub(r"\s+", " ", text).strip()


def _parted(text: str) -> tuple[str, str]:
    """Return a message's first sentence and its others."""
    found = re.match(r"(.*?[^.]\.)\s+(?=[A-Z‹\"(])(.*)", text)
    return (found[1], found[2]) if found else (text, "")


def _escaped(text: str) -> str:
    """Return a text whose characters mean nothing in Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text)
