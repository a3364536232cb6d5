"""HTML in which every text is escaped: only what was made here is taken as markup."""

from __future__ import annotations

import html

from paceline.visible import visible


class Html(str):
    """A piece of HTML, as opposed to a text that has still to be escaped."""

    __slots__ = ()


def escaped(text: str) -> Html:
    """A text as HTML shows it; characters that hide, or are none, are shown as escapes."""
    return text if isinstance(text, Html) else Html(html.escape(visible(text)))


def joined(*parts: str | None) -> Html:
    """Pieces of HTML and texts, one after the other."""
    return Html("".join(escaped(part) for part in parts if part is not None))


def element(tag: str, *parts: str | None, **attributes: str | bool | None) -> Html:
    """An element with its content; an attribute is named as in HTML, with _ for - and without one at its end."""
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(_text(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    opening = f"<{tag}{written}>"
    return Html(opening if tag in ("br", "img", "input", "meta", "option") else f"{opening}{joined(*parts)}</{tag}>")


def _text(value: str) -> str:
    """What can be written of an attribute: bytes of a file's name that are no text are question marks."""
    return value.encode(errors="replace").decode()


def html_table(
    header: list[str], lines: list[list[str]], numbers_from: int = 1, **attributes: str | bool | None
) -> Html:
    """A table whose cells are numbers from a column on, so that they stand under each other."""

    def cells(tag: str, line: list[str]) -> Html:
        columns = (
            element(tag, cell, class_="number" if column >= numbers_from else None) for column, cell in enumerate(line)
        )
        return element("tr", *columns)

    body = [cells("td", line) for line in lines]
    content = [element("thead", cells("th", header)), element("tbody", *body)]
    return element("div", element("table", *content, **attributes), class_="wide")
