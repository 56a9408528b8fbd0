"""docs/te_selection.md says of every rule from which release to which it holds, as the tables do."""

from collections.abc import Iterable, Iterator

from mla_plugin.resolver.transformer_engine.cascade import RULES
from mla_plugin.resolver.transformer_engine.cudnn import HEAD_DIMS, LATER_LAYOUTS, REQUIREMENTS, UP_TO_512
from mla_plugin.resolver.transformer_engine.flash import DISTRIBUTIONS, PACKAGES
from mla_plugin.resolver.transformer_engine.inputs import FIELDS, SWITCHES
from mla_plugin.resolver.transformer_engine.query import ALIBI_AS_BIAS
from mla_plugin.resolver.transformer_engine.release import NEWEST, RELEASES, Span
from tests.repository.project import ROOT

PAGE = (ROOT / "docs" / "te_selection.md").read_text()
NAMES = {
    "flash": "FlashAttention",
    "flash2": "FA2",
    "flash3": "FA3",
    "flash4": "FA4",
    "fused": "cuDNN",
    "unfused": "unfused",
}


def releases(span: Span) -> str:
    """The releases of an entry, in the words of the page."""
    if span.since is None:
        return "all" if span.until is None else f"to {span.until}"
    if span.until is None:
        return f"{span.since} on"
    return span.since if span.since == span.until else f"{span.since} to {span.until}"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a header row that begins so."""
    lines = PAGE.partition(f"| {heading} | releases |")[2].splitlines()[2:]
    table = lines[: next(index for index, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_rules_stand_on_the_page_with_their_releases() -> None:
    removed: dict[tuple[str, str], set[str]] = {}
    for rule in RULES:
        removed.setdefault((rule.number, releases(rule)), set()).update(rule.removes)
    expected = {key: ", ".join(NAMES[name] for name in NAMES if name in names) for key, names in removed.items()}
    page = [((number, span), turned_off) for number, span, turned_off, _ in rows("rule")]
    assert dict(page) == expected
    assert len(page) == len(expected)
    order = [rule.number for rule in RULES]
    numbers = [number for (number, _), _ in page]
    assert list(dict.fromkeys(numbers)) == list(dict.fromkeys(order))


def test_what_counts_as_installed_stands_on_the_page_with_its_releases() -> None:
    expected = [(f"`{DISTRIBUTIONS[package.backend]}`", releases(package)) for package in PACKAGES]
    assert [(name, span) for name, span, _ in rows("package")] == expected


def _what_a_release_reads() -> Iterator[tuple[str, Span]]:
    yield from ((f"`{entry.name}`", entry) for entry in (*SWITCHES, *FIELDS))
    yield from (("ALiBi as a bias (36)", entry) for entry in ALIBI_AS_BIAS)
    yield from ((f"layout `{entry.layout}`", entry) for entry in LATER_LAYOUTS)
    yield from ((f"42 ({entry.letter})", entry) for entry in _bounded(HEAD_DIMS))
    yield from ((f"42, {entry.about}", entry) for entry in _bounded(REQUIREMENTS))
    yield ("42, short sequences", UP_TO_512)


def _bounded(entries: Iterable[Span]) -> Iterator:
    return (entry for entry in entries if releases(entry) != "all")


def test_what_a_release_reads_stands_on_the_page() -> None:
    expected = [(name, releases(entry)) for name, entry in _what_a_release_reads()]
    assert [(name, span) for name, span, _ in rows("what")] == expected


def test_the_page_names_the_known_releases() -> None:
    first = ".".join(map(str, RELEASES[0]))
    assert f"TransformerEngine {first} to\n{NEWEST}" in PAGE
    assert f"outside\n{first} to {'.'.join(map(str, RELEASES[-1]))} is an error" in PAGE
