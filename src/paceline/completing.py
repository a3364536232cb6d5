"""What a shell may complete: names of recipes, placements and networks, settings and their values, run folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from typer import Context

SCRIPTS = {
    "bash": r"""
_paceline() {
    local IFS=$'\n'
    COMPREPLY=($(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _PACELINE_COMPLETE=complete_bash \
        "$1" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -o default -F _paceline paceline
""",
    "zsh": r"""
_paceline() {
    local -a found
    found=(${(f)"$(COMP_WORDS="${(F)words[1,CURRENT]}" COMP_CWORD=$((CURRENT - 1)) _PACELINE_COMPLETE=complete_bash \
        $words[1] 2>/dev/null)"})
    (($#found)) || _files
    compadd -S '' -- ${(M)found:#*[=.\/]}
    compadd -- ${found:#*[=.\/]}
}
(($+functions[compdef])) || { autoload -Uz compinit && compinit }
compdef _paceline paceline
""",
    "fish": r"""
function _paceline
    set -l words (commandline -opc)
    COMP_WORDS=(commandline -cp | string collect) COMP_CWORD=(count $words) _PACELINE_COMPLETE=complete_bash \
        $words[1] 2>/dev/null
end
complete -c paceline -a '(_paceline)'
""",
}
"""For each shell, how it asks Paceline; what ends in '=', '.' or '/' goes on, and gets no space."""


def recipe_or_folder(context: Context, incomplete: str) -> list[str]:
    """A recipe or a folder of one's own; or already a setting, once a letter is there."""
    return [*recipe(incomplete), *_folders(incomplete), *(setting(context, incomplete) if incomplete else [])]


def recipe(incomplete: str) -> list[str]:
    """A recipe, or a page of one's own."""
    return [*recipe_name(incomplete), *_pages(incomplete)]


def recipe_name(incomplete: str) -> list[str]:
    """A recipe that comes with Paceline; of those that others published, once a letter is there."""
    from paceline.settings.shipped import names, own_names

    return _starting(incomplete, names("recipes") if incomplete else own_names("recipes"))


def placement(incomplete: str) -> list[str]:
    """A placement, or a page of one's own."""
    return [*placement_name(incomplete), *_pages(incomplete)]


def placement_name(incomplete: str) -> list[str]:
    """A placement that comes with Paceline."""
    from paceline.settings.shipped import names

    return _starting(incomplete, names("placements"))


def network(incomplete: str) -> list[str]:
    """A network."""
    return _values("model", incomplete)


def run(incomplete: str) -> list[str]:
    """A run folder, or a folder on the way to one."""
    folders = [path.removesuffix("/") for path in _folders(incomplete)]
    return [folder if Path(folder, "record.jsonl").is_file() else f"{folder}/" for folder in folders]


def recipe_or_run(incomplete: str) -> list[str]:
    """A recipe or a run folder."""
    return [*recipe(incomplete), *run(incomplete)]


def one_of(*words: str) -> Callable[[str], list[str]]:
    """One of a few words."""
    return lambda incomplete: _starting(incomplete, words)


def setting(context: Context, incomplete: str) -> list[str]:
    """A setting of the recipe or, after on., of the placement: its key up to the next dot, or a value."""
    from paceline.settings.addresses import all_addresses

    if key := _key_before(context):
        return _values(key, incomplete)
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={each}" for each in _values(key, value)]
    levels = dict[str, None]()
    for address in _starting(incomplete, all_addresses()):
        rest, dot, _ = address[len(incomplete) :].partition(".")
        if dot or _has_value(address):
            levels[f"{incomplete}{rest}{dot or '='}"] = None
    return list(levels)


def on_setting(context: Context, incomplete: str) -> list[str]:
    """A setting of the placement."""
    return [word for word in setting(context, incomplete or "on.") if _key_before(context) or word.startswith("on.")]


def data_setting(context: Context, incomplete: str) -> list[str]:
    """A setting of the data, without data. before it."""
    return [word.removeprefix("data.") for word in setting(context, f"data.{incomplete}")]


def recipe_or_data_setting(context: Context, incomplete: str) -> list[str]:
    """A recipe or, without one, a setting of the data."""
    return [*recipe(incomplete), *data_setting(context, incomplete)]


def _key_before(context: Context) -> str:
    """The setting whose value alone is asked for, by a shell that cuts words at '='."""
    from paceline.settings.addresses import fields_at

    lists = [given if isinstance(given, list) else [given] for given in context.params.values()]
    words = [word for given in lists for word in given if isinstance(word, str)]
    if words[-1:] == ["="]:
        words.pop()
    return words[-1] if words and fields_at(words[-1]) else ""


def _has_value(address: str) -> bool:
    """Whether a setting takes a word: a section that is of one kind only does not."""
    from paceline.settings.addresses import fields_at
    from paceline.settings.schema import groups, kinds

    return any(kinds(info) or not any(groups(info.annotation)) for info in fields_at(address))


def _values(address: str, incomplete: str) -> list[str]:
    """The values that a setting chooses from."""
    from paceline.settings.addresses import fields_at
    from paceline.settings.schema import choices, kinds

    listed = [value for info in fields_at(address) for value in (*kinds(info), *choices(info.annotation))]
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in listed if value is not None]
    return _starting(incomplete, dict.fromkeys(texts))


def _pages(incomplete: str) -> list[str]:
    return [path for path in _paths(incomplete) if path.endswith((".yaml", ".yml"))]


def _folders(incomplete: str) -> list[str]:
    return [path for path in _paths(incomplete) if path.endswith("/")]


def _paths(incomplete: str) -> Iterator[str]:
    """The paths that a word may be the start of, folders with a '/'; a shell itself quotes those with a space."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        children = sorted(Path(folder + slash).iterdir())
    except OSError:
        return
    for child in children:
        hidden = child.name.startswith(".") and not name
        if child.name.startswith(name) and not hidden and " " not in child.name:
            yield f"{folder}{slash}{child.name}{'/' if child.is_dir() else ''}"


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
