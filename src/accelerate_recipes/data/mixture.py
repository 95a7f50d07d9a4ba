"""Sources of a run's data: one, or as YAML names them several with weights, and which weights hold from which step on."""

import copy
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import FileOrSection, Texts, parse_groups, read_yaml
from accelerate_recipes.arguments.help import recipe_parser
from accelerate_recipes.errors import ConfigError, collecting_errors, raise_problems, suggestion

# Flags that would name data beside those of a mixture.
WHICH_DATA = ("dataset_name", "train_files", "eval_files", "validation_files")
SIZE = "size"
FURTHEST = 1e9  # times the smallest weight: the largest, beyond which places of a run would not be exact numbers
INSIDE = "--mixture"  # what messages call a mixture that the preset holds
# Names are also in the log, where eval_loss and aux_loss are no loss of a source.
NAME = re.compile(r"(?!eval_|aux$)\w[\w.-]*", re.ASCII)

# Weights by source, each from a step on, in the order of the steps.
Weights = list[tuple[int, dict[str, float]]]


class Source(NamedTuple):
    """One source of a run, without a name if it is the only one. `values` are arguments of the recipe that hold for it.

    A weight of None is that of its size.
    """

    name: str = ""
    weight: float | None = 1.0
    max_epochs: float = math.inf
    values: Mapping[str, Any] = MappingProxyType({})

    @property
    def limit(self) -> float | None:
        """Return `max_epochs` as a checkpoint holds them: None if there is no limit."""
        return self.max_epochs if math.isfinite(self.max_epochs) else None


class MixturePhase(NamedTuple):
    """Weights and a factor on the learning rate that hold from a step on; `begin` below 1 is a share of the run's steps.

    Without weights, or without a factor (None), those before hold on.
    """

    begin: float
    weights: dict[str, float]
    lr_factor: float | None = None
    max_length: int = 0  # tokens of a row; 0: as many as before

    def first_step(self, total_steps: int) -> int:
        return round(self.begin * total_steps if self.begin < 1 else self.begin)


@dataclass
class Mixture:
    """Sources of a run, by name, and its phases, in order. `problems` says what is wrong with the `file`."""

    file: str = ""
    sources: list[Source] = field(default_factory=list)
    phases: list[MixturePhase] = field(default_factory=list)
    temperature: float = 1.0
    problems: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the sources, which the log tells apart; none without a mixture."""
        return [source.name for source in self.sources if source.name]

    def weights(self, sizes: Mapping[str, int], total_steps: int) -> Weights:
        """List the weights of a run from its first step on. `sizes` are the numbers of rows by source, where they count.

        Raises:
            ConfigError: for weights of sizes that are too far apart.
        """
        remedy = f"raise temperature {self.temperature:g}"
        try:
            first = {
                source.name: sizes[source.name] ** (1 / self.temperature) if source.weight is None else source.weight
                for source in self.sources
            }
        except OverflowError:
            raise ConfigError(f"{self.file}: the weights are too large; {remedy}") from None
        raise_problems("This mixture cannot be used", far_apart(first.values(), self.file, remedy))
        later = [(phase.first_step(total_steps), phase.weights) for phase in self.phases if phase.weights]
        return without_repeats([(0, first), *later])

    def lengths(self, total_steps: int) -> list[tuple[int, int]]:
        """List the lengths of rows, each from a step on, that differ from those of the first phase."""
        return [(phase.first_step(total_steps), phase.max_length) for phase in self.phases if phase.max_length]

    def check_phases(self, num_steps: int) -> None:
        """Raise ConfigError for a phase that begins after the last step."""
        if late := [phase.begin for phase in self.phases if phase.first_step(num_steps) >= num_steps]:
            raise ConfigError(f"{self.file}, phase from {late[0]:g}: it begins after the last step, {num_steps}")


ONE_SOURCE = Mixture(sources=[Source()])


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights that add up to 1."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def without_repeats(weights: Weights) -> Weights:
    """Leave out entries that change no share: the error diffusion would begin anew there."""
    kept: Weights = []
    for step, entry in weights:
        then = shares_of(kept[-1][1]) if kept else {}
        if not kept or any(not math.isclose(share, then[name]) for name, share in shares_of(entry).items()):
            kept.append((step, entry))
    return kept


def continued(before: Sequence[Sequence[Any]], step: int, now: Weights) -> Weights:
    """Return the weights of a run that is resumed at `step`: those `before` that step, as they were, then those of `now`."""
    at_step = [entry for begin, entry in now if begin <= step][-1]
    past = [(begin, entry) for begin, entry in before if begin < step]
    return without_repeats([*past, (step, at_step), *((begin, entry) for begin, entry in now if begin > step)])


def changed_shares(before: Sequence[Sequence[Any]], now: Weights, step: int) -> str:
    """Say which shares hold from `step` on, if a run that is resumed there had others `before`; "" if not."""
    then, after = ([entry for begin, entry in table if begin <= step][-1] for table in (before, now))
    then, after = (", ".join(f"{name} {share:.2%}" for name, share in shares_of(one).items()) for one in (then, after))
    return f"Shares from step {step + 1} on: {after}; before: {then}" if then != after else ""


@dataclass
class MixtureArgs:
    """Argument of a recipe that can train on several sources. Put it before the class with the arguments of one source."""

    group = "data"
    mixture: FileOrSection = arg(
        "",
        "YAML file that names several sources to train on, with weights, or in a preset its content; see docs/mixtures.md.",
        fixed=False,
    )

    # Names of the arguments that a source of a mixture may set.
    of_source: ClassVar[tuple[str, ...]]

    # What a phase may change.
    of_phase: ClassVar[tuple[str, ...]] = ("weights", "lr_factor")

    @cached_property
    def mix(self) -> Mixture:
        """Content of --mixture; without one, a single source."""
        if not self.mixture:
            return ONE_SOURCE
        # A file on a volume that this machine does not see is read where the run is.
        is_unseen = self.is_elsewhere(self.mixture) and not Path(self.mixture).exists()  # pyright: ignore
        return Mixture(self.mixture) if is_unseen else read_mixture(self.mixture, type(self))

    def values(self) -> dict[str, Any]:
        """Return all arguments by name; a mixture that the preset holds is a section, as there."""
        arguments = super().values()  # pyright: ignore[reportAttributeAccessIssue]
        return arguments | {"mixture": section_in(self.mixture) or self.mixture}

    @property
    def sources(self) -> list[Any]:
        """Arguments of a run on each source alone, in the order of `mix.sources`; without a mixture, these arguments."""
        if not self.mixture:
            return [self]
        unset = {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(self)
            if f.name in WHICH_DATA
        }
        arguments = []
        for source in self.mix.sources:
            arguments.append(copy.copy(self))
            vars(arguments[-1]).pop("mix", None)
            vars(arguments[-1]).update(unset | {"mixture": "", "source_name": source.name, **source.values})
        return arguments

    @property
    def phases(self) -> list[MixturePhase]:
        """Phases of the mixture."""
        return self.mix.phases

    def source_problems(self) -> list[str]:
        if not self.mixture:
            return super().source_problems()  # pyright: ignore[reportAttributeAccessIssue]
        own = [(f"{self.mix.file}, source {one.source_name}", one.source_problems()) for one in self.sources]
        of_sources = [f"{where}: {problem}" for where, problems in own for problem in problems]
        return [*self.mix.problems, *of_sources, *self.mixture_problems()]

    def mixture_problems(self) -> Iterator[str]:
        """List what of the mixture and the flags does not go together, one sentence each."""
        mixture, file, args = self.mix, self.mix.file, vars(self)
        defaults = {f.name: f.default for f in fields(self)}
        for name in (*WHICH_DATA, "num_train_epochs"):
            value = args.get(name)
            if value and value != defaults[name]:
                shown = " ".join(map(str, value)) if isinstance(value, list) else value
                remedy = "give max_epochs of each source, or --max_steps" if name[0] == "n" else "name it as a source"
                yield f"--{name} {shown} has no effect with the sources of {file}; {remedy}, and remove it here"
        for source in mixture.sources:
            if defaults["dataset_name"] and not {*WHICH_DATA[:2]} & {*source.values}:
                yield f"{file}, source {source.name}: it names no data; give dataset_name or train_files"
        endless = [source.name for source in mixture.sources if math.isinf(source.max_epochs)]
        steps = args["max_steps"]
        if steps < 0 and endless:
            yield f"--max_steps is missing: {', '.join(endless)} of {file} would never end; or give max_epochs"
        begins = []
        for phase in mixture.phases:
            if phase.begin < 1 and steps < 0:
                yield f"{file}, phase from {phase.begin:g}: a share of the run needs --max_steps; or give a step"
                return
            begins.append(phase.first_step(steps))
            if 0 < steps <= begins[-1]:
                yield f"{file}, phase from {phase.begin:g}: it begins after the last step, --max_steps {steps}"
        if begins != sorted({*begins}) or 0 in begins:
            yield f"{file}: phases begin after the steps {', '.join(map(str, begins))}; let each begin later"


def section_in(mixture: str) -> dict[str, Any] | None:
    """Return the content of a mixture that the preset holds; None for the name of a file."""
    try:
        content = json.loads(mixture)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def read_mixture(given: str, args_class: type[MixtureArgs]) -> Mixture:
    """Read a mixture, as --mixture gives it. What is wrong with it is in `problems` of the result."""
    content: Any = section_in(given)
    file, problems = INSIDE if content else given, []
    with collecting_errors(problems, "--mixture "):
        content = content or read_yaml(Path(given), Texts)
    if problems:
        return Mixture(file, problems=problems)
    if not isinstance(content, dict) or not isinstance(content.get("sources"), list):
        must = "must hold `sources:`, a list of sections with a name, a weight and data; docs/mixtures.md"
        return Mixture(file, problems=[f"{file} {must}"])
    problems += unknown_keys(content, ("sources", "temperature", "phases"), file)
    sections = enumerate(content["sources"], 1)
    sources = [read_source(section, number, file, args_class, problems) for number, section in sections]
    names = [source.name for source in sources]
    if not names:
        problems.append(f"{file} names no source")
    problems += [f"{file}: two sources are called {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    phases = content.get("phases") or []
    phases = phases if isinstance(phases, list) else [phases]
    numbered = ((f"{file}, phase {number}", section) for number, section in enumerate(phases, 1))
    phases = [read_phase(section, where, names, args_class.of_phase, problems) for where, section in numbered]
    temperature = number_in(content, "temperature", 1.0, file, problems, above=0)
    # By name: what a run trains on does not depend on their order in the file.
    mixture = Mixture(file, sorted(sources, key=lambda source: source.name), phases, temperature)
    sizes = [source.name for source in sources if source.weight is None]
    if sizes and len(sizes) < len(sources):
        problems.append(f"{file}: {', '.join(sizes)} have weight: {SIZE}, and others a number; give all of them alike")
    elif "temperature" in content and not sizes:
        problems.append(f"{file}: temperature is for weight: {SIZE}; remove it")
    elif sources and not sizes and not any(source.weight for source in sources):
        problems.append(f"{file}: no source has a weight above 0")
    problems += far_apart((source.weight or 0 for source in sources), file)
    mixture.problems = problems
    return mixture


def unknown_keys(section: Mapping[str, Any], known: Collection[str], where: str) -> list[str]:
    """List the keys of a section that mean nothing, one sentence each."""
    there = f"; there are {', '.join(known)}"
    unknown = [key for key in section if key not in known]
    return [f"{where}: unknown key {key!r}{suggestion(key, known, cutoff=0.6) or there}" for key in unknown]


def far_apart(weights: Iterable[float], where: str, remedy: str = "a weight of 0 leaves a source out") -> list[str]:
    """Say that weights are too far apart, if they are; 0 is no weight."""
    given = sorted(weight for weight in weights if weight)
    if not given or given[-1] / given[0] <= FURTHEST:
        return []
    return [f"{where}: the weights {given[0]:g} and {given[-1]:g} are more than {FURTHEST:g} times apart; {remedy}"]


def number_in(
    section: Mapping[str, Any], key: str, default: float, where: str, problems: list[str], above: float = -math.inf
) -> float:
    """Read a finite number of at least 0; note in `problems` what is wrong with it."""
    if key not in section:
        return default
    value = section[key]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and number >= 0 and number > above:
        return number
    shown = "null" if value is None else value
    problems.append(f"{where}: {key} is {shown}; it must be a number {'above' if above == 0 else 'of at least'} 0")
    return default


def read_source(section: Any, number: int, file: str, args_class: type[MixtureArgs], problems: list[str]) -> Source:
    """Read one source of a mixture, its arguments by the parser of the recipe; note in `problems` what is wrong."""
    where = f"{file}, source {number}"
    if not isinstance(section, dict):
        problems.append(f"{where} is {section!r:.60}; it must be a section with a name, a weight and data")
        section = {}
    name = section.get("name")
    if isinstance(name, str) and NAME.fullmatch(name):
        where = f"{file}, source {name}"
    else:
        of_log = "not begin with eval_, nor be aux: the log has such names"
        must = of_log if isinstance(name, str) and NAME.fullmatch(f"x{name}") else "be letters, digits, _, - and ."
        problems.append(f"{where}: its name is {name if name else 'missing'}; it must {must}")
        name = f"number {number}"
    if "weight" not in section:
        problems.append(f"{where}: its weight is missing; give a number, or {SIZE}")
    weight = None if section.get("weight") == SIZE else number_in(section, "weight", 1.0, where, problems)
    max_epochs = number_in(section, "max_epochs", math.inf, where, problems, above=0)
    problems += unknown_keys(section, ("name", "weight", "max_epochs", *args_class.of_source), where)
    given = {f"--{key}": section[key] for key in args_class.of_source if section.get(key) not in (None, [])}
    groups = [(flag, value if isinstance(value, list) else [value], f"in {where}") for flag, value in given.items()]
    owned_elsewhere: Any = args_class.owned_elsewhere  # pyright: ignore[reportAttributeAccessIssue]
    parsed, right, wrong = parse_groups(recipe_parser(args_class), owned_elsewhere, groups)
    problems += wrong
    return Source(name, weight, max_epochs, {flag[2:]: getattr(parsed, flag[2:]) for flag in right})


def read_phase(
    section: Any, where: str, names: Sequence[str], known: Sequence[str], problems: list[str]
) -> MixturePhase:
    """Read one phase of a mixture; note in `problems` what is wrong."""
    if not isinstance(section, dict):
        problems.append(f"{where} is {section!r:.60}; it must be a section with from, {' and '.join(known)}")
        return MixturePhase(1, {})
    problems += unknown_keys(section, ("from", *known), where)
    begin = number_in(section, "from", 0, where, problems, above=0)
    if "from" not in section or (begin >= 1 and begin % 1):
        problems.append(f"{where}: from is {section.get('from')}; it must be a step, or a share of the run below 1")
    given = section.get("weights", {})
    if not isinstance(given, dict) or (not given and "weights" in section):
        problems.append(f"{where}: weights is {given!r:.60}; it must be a section with a weight of each source")
        given = {}
    weights = {name: number_in(given, name, 0.0, f"{where}, weights", problems) for name in given}
    if lost := [name for name in names if given and name not in given]:
        problems.append(f"{where}: weights lacks {', '.join(lost)}; a weight of 0 leaves a source out")
    problems += unknown_keys(given, names, f"{where}, weights") + far_apart(weights.values(), where)
    if given and not any(weights.values()):
        problems.append(f"{where}: no weight is above 0")
    if not {*section}.intersection(known):
        problems.append(f"{where} changes nothing; give {' or '.join(known)}")
    factor = number_in(section, "lr_factor", 1.0, where, problems)
    length = number_in(section, "max_length", 0, where, problems)
    if "max_length" in section and (length < 2 or length % 1):
        problems.append(f"{where}: max_length is {section['max_length']}; it must be a number of tokens, 2 or more")
    return MixturePhase(begin, weights, factor if "lr_factor" in section else None, int(length))


def check_same_sources(before: Mapping[str, Any], state: Mapping[str, Any], file: str) -> None:
    """Raise ConfigError if a resumed run has other sources than its checkpoint, or others of their `max_epochs`.

    The states before and now hold under `sources`, by the name of each, what decides its rows and their order. Earlier
    versions wrote no `sources` without a mixture.
    """
    now = state["sources"]
    then = before.get("sources", {"": {"max_epochs": None}})
    if "" in {*then} - {*now}:
        raise ConfigError(
            "the checkpoint was trained without a mixture; remove --mixture, or start anew in another --output_dir"
        )
    if "" in {*now} - {*then}:
        raise ConfigError("the checkpoint is that of a run with --mixture; give it again, or another --output_dir")
    new, lost = (", ".join(sorted({*one} - {*other})) for one, other in ((now, then), (then, now)))
    if new or lost:
        added = f"{new} new in {file}" if new else ""
        gone = f"{lost} no longer in it" if lost and new else f"{lost} no longer in {file}" if lost else ""
        raise ConfigError(
            f"the sources are others than the checkpoint's: {' and '.join(filter(None, (added, gone)))}; a source may get "
            "the weight 0, but a run keeps those with which it began: put them back, or start anew in another --output_dir"
        )
    for name, facts in now.items():
        if facts["max_epochs"] != then[name]["max_epochs"]:
            raise ConfigError(
                f"{file}, source {name}: max_epochs is {facts['max_epochs'] or 'missing'}, the checkpoint has "
                f"{then[name]['max_epochs'] or 'none'}; set it back (weights may change), or start anew in another "
                "--output_dir"
            )
