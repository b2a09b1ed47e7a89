"""The report's page: its style and its parts as HTML text.

Lives here: colours of both schemes, tables, tiles, figures. Does not: which figures there are
(report.py), pictures (plots.py). The page asks for nothing from outside: no scripts, no fonts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

LIGHT = ("#2f6db3", "#d9792b", "#2e9471", "#b8435a", "#7c5cb0", "#8b6a3f", "#c864a0", "#7a8594")
DARK = ("#6fa8e8", "#f0a35c", "#5cc9a1", "#e8808f", "#b39be0", "#c9a876", "#e69cc8", "#9aa5b3")
"""Told apart by people who see fewer colours as well: neighbours differ in lightness."""


def _colours(values: Sequence[str]) -> str:
    return "".join(f"--s{place}:{value};" for place, value in enumerate(values))


_CLASSES = "".join(
    f".line.s{place}{{stroke:var(--s{place})}}"
    f".area.s{place},.bar.s{place}{{fill:var(--s{place})}}"
    f".swatch.s{place}{{background:var(--s{place})}}"
    for place in range(len(LIGHT))
)

STYLE = f"""
:root{{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1c2530;--soft:#5d6876;
--rule:#e1e5ea;--best:#e5f3ec;--best-ink:#146146;--mark:#b8435a;{_colours(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--ground:#12161c;--card:#1a2029;--ink:#e6eaf0;
--soft:#98a4b3;--rule:#2c3542;--best:#173428;--best-ink:#7fd8b2;--mark:#e8808f;{_colours(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:28px 24px 64px}}
h1{{font-size:24px;margin:0 0 4px;letter-spacing:-.01em}}
h2{{font-size:18px;margin:36px 0 12px}}
h3{{font-size:15px;margin:24px 0 8px}}
p{{margin:0 0 8px;max-width:80ch}} .soft{{color:var(--soft)}}
code{{font:13px ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;
overflow-wrap:anywhere}}
.facts{{display:flex;flex-wrap:wrap;gap:4px 24px;margin:8px 0 0;padding:0;list-style:none}}
.facts b{{font-weight:600}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;
margin:20px 0}}
.tile,.card{{background:var(--card);border:1px solid var(--rule);border-radius:8px}}
.tile{{padding:12px 16px}} .tile span{{display:block;color:var(--soft);font-size:13px}}
.tile b{{font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}}
.tile small{{display:block;color:var(--soft);font-size:12px}}
.plots{{align-items:start;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr));gap:16px}}
figure{{margin:0;padding:14px 16px 10px;background:var(--card);border:1px solid var(--rule);
border-radius:8px;min-width:0}}
figcaption{{font-weight:600;font-size:14px}}
figcaption small{{display:block;font-weight:400;color:var(--soft);font-size:12px}}
svg{{display:block;width:100%;height:auto;margin-top:6px;overflow:visible}}
.grid{{stroke:var(--rule);stroke-width:1}} .axis{{stroke:var(--soft);stroke-width:1}}
.mark{{stroke:var(--mark);stroke-width:1.2;stroke-dasharray:5 4}}
.tick,.label{{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}}
.line{{fill:none;stroke-linejoin:round;stroke-linecap:round}}
.w0{{stroke-width:3}} .w1{{stroke-width:2.3}} .w2{{stroke-width:1.7}} .w3{{stroke-width:1.3}}
.line.d1{{stroke-dasharray:6 3}} .line.d2{{stroke-dasharray:2 3}}
.area{{fill-opacity:.82}} .swatch.d1,.swatch.d2{{opacity:.55}}
{_CLASSES}
.legend{{display:flex;flex-wrap:wrap;gap:2px 16px;margin:4px 0 0;padding:0 0 0 4px;list-style:none;
font-size:12.5px;color:var(--soft)}}
.swatch{{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13.5px}}
th,td{{padding:5px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}}
th{{font-weight:600;color:var(--soft);font-size:12.5px;vertical-align:bottom}}
th:first-child,td:first-child,.left{{text-align:left}}
tbody tr:last-child td{{border-bottom:0}}
tr.part td{{font-weight:600;padding-top:14px;color:var(--ink)}}
td small{{color:var(--soft);font-size:11.5px;display:inline-block;min-width:54px}}
td.best{{background:var(--best);color:var(--best-ink);font-weight:600}}
details{{margin:14px 0}} summary{{cursor:pointer;font-weight:600;padding:4px 0}}
nav{{margin:12px 0 0;display:flex;flex-wrap:wrap;gap:4px 16px;font-size:14px}}
a{{color:var(--s0)}}
@media print{{body{{background:#fff}} .card,figure,.tile{{break-inside:avoid}}}}
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell: text, a small remark beside it, whether it is the best of its row."""

    text: str
    remark: str = ""
    best: bool = False


def document(title: str, body: Iterable[str]) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def heading(text: str, level: int = 2, anchor: str = "") -> str:
    """A heading, with an anchor where one is given."""
    mark = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{mark}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    """Soft text."""
    return f'<p class="soft">{escape(text)}</p>'


def facts(items: Iterable[tuple[str, str]]) -> str:
    """Words and values in a row."""
    rows = "".join(
        f'<li><span class="soft">{escape(word)}</span> <b>{escape(value)}</b></li>'
        for word, value in items
    )
    return f'<ul class="facts">{rows}</ul>'


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Large figures: a word, the value, a remark."""
    rows = "".join(
        f'<div class="tile"><span>{escape(word)}</span><b>{escape(value)}</b>'
        f"<small>{escape(remark)}</small></div>"
        for word, value, remark in items
    )
    return f'<div class="tiles">{rows}</div>'


def figure(title: str, remark: str, drawing: str) -> str:
    """A plot with its caption."""
    small = f"<small>{escape(remark)}</small>" if remark else ""
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{drawing}</figure>"


def plots(figures: Iterable[str]) -> str:
    """Figures side by side where there is room."""
    return f'<div class="plots">{"".join(figures)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[Cell] | str], *, left: int = 1) -> str:
    """Rows under a head; a row that is a string opens a part. The first `left` columns are words.

    Without a head there is none.
    """
    rows = list(rows)
    num = max([len(head), *(len(row) for row in rows if not isinstance(row, str))])
    words = [f"<th{_left(place, left)}>{escape(word)}</th>" for place, word in enumerate(head)]
    top = f"<thead><tr>{''.join(words)}</tr></thead>" if head else ""
    body = []
    for row in rows:
        if isinstance(row, str):
            body.append(f'<tr class="part"><td colspan="{num}">{escape(row)}</td></tr>')
            continue
        cells = "".join(
            f"<td{' class=best' if cell.best else _left(place, left)}>{escape(cell.text)}"
            + (f" <small>{escape(cell.remark)}</small>" if cell.remark else "")
            + "</td>"
            for place, cell in enumerate(row)
        )
        body.append(f"<tr>{cells}</tr>")
    return f'<div class="card scroll"><table>{top}<tbody>{"".join(body)}</tbody></table></div>'


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    """A part that can be folded."""
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"
    )


def links(items: Iterable[tuple[str, str]]) -> str:
    """Anchors of this page."""
    rows = "".join(f'<a href="#{escape(anchor)}">{escape(word)}</a>' for anchor, word in items)
    return f"<nav>{rows}</nav>"


def _left(place: int, left: int) -> str:
    return ' class="left"' if place < left else ""
