"""The colours of a plan's page. Each text stands on its ground with a contrast of 4.5 to 1 or more (WCAG 2, AA)."""

from __future__ import annotations

from collections.abc import Mapping

from blockconv.core.layout import Layout

# One hue for each layout that kernels run in, the plain ones grey and amber; the same in the light and the dark.
FILLS = {
    "NCHW": "#b4bcc6", "NHWC": "#e9b96e", "NCHW4": "#8fd0cf", "NCHW8": "#8cc4f2", "NCHW16": "#9db4f5",
    "NCHW32": "#c0aaf2", "NCHW64": "#e3a3e6", "CHWN4": "#93d6a2",
    "other": "#d5d9de", "reorder": "#ff9d94",
}  # fmt: skip
ON_FILL = "#14171c"  # the text in a box

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "paper": "#ffffff", "band": "#f3f5f8", "ink": "#1b2028", "muted": "#59616d", "line": "#dfe3e8",
        "wire": "#7b8594", "predicted": "#7d8ba3", "measured": "#3d5a98", "alert": "#b3261e",
    },
    "dark": {
        "paper": "#14171c", "band": "#1e232b", "ink": "#e6e9ee", "muted": "#a3acb8", "line": "#343b46",
        "wire": "#8a94a3", "predicted": "#8494b0", "measured": "#6ea0ff", "alert": "#ff9d94",
    },
}  # fmt: skip
TEXTS = ("ink", "muted", "alert")  # colours of a theme that text is written in, on its "paper" and its "band"


def fill(layout: Layout) -> str:
    """The colour of a layout."""
    return FILLS.get(layout.name, FILLS["other"])


def variables() -> str:
    """The colours as the variables of a style sheet; the dark ones where the reader's system asks for them."""

    def block(theme: str) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in THEMES[theme].items())

    return (
        f":root{{color-scheme:light dark;--on-fill:{ON_FILL};{block('light')}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{block('dark')}}}}}"
    )
