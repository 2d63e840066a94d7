"""``devplan inspect ARTIFACT``: say what is inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import flags
from .console import Output

EXAMPLE = """Examples:

devplan inspect model.pte --plan

devplan inspect model.pte --json | jq '.methods[0].arenas'
"""


_LARGE = 256 << 20
"""Bytes above which the digest, which reads the constants too, must be asked for."""


def inspect(
    artifact: flags.Artifact,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show each arena as blocks over the instructions.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show what is alive at each peak, and what was not done and why."),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="Write the memory report as one page."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE.svg", help="Draw the first method's arenas for a document."),
    ] = None,
    method: flags.Method = None,
    sha256: Annotated[
        bool | None,
        typer.Option(
            "--sha256/--no-sha256",
            help="Read all of the file, for its digest and to check the constants; with `--json` below "
            "256 MiB if left out.",
        ),
    ] = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Say what is inside: methods, signatures, copies, arenas, kernels, architectures, constants."""
    from .artifacts import check_targets, open_artifact

    check_targets(report, svg, sources=(artifact,))
    out = Output(json, quiet, verbose)
    opened = open_artifact(artifact)
    if sha256 is None:
        sha256 = json and artifact.stat().st_size < _LARGE
    if sha256:  # which reads the file anyway
        opened.artifact.verify_constants(made=False)
    described = opened.describe(method, sha256=sha256)
    out.document(described)
    if not json:
        from .explain import explanation
        from .inspect_view import overview
        from .summary import bucket_tables
        from .timeline import timelines

        if plan:
            out.show(*timelines(described, opened.origins()))
        if explain:
            out.show(*explanation(opened.planned, [entry["name"] for entry in described["methods"]]))
            out.show(*bucket_tables(described))
        if not (plan or explain):
            out.show(*overview(described, verbose=verbose))
    if report is not None:
        from .report import write_page

        write_page(report, artifact.name, described, opened.planned)
        out.say(f"wrote {report}")
    if svg is not None:
        from .report.svg import write_svg

        write_svg(svg, described)
        out.say(f"wrote {svg}")
    return 0
