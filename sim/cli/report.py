"""``kvsim report``: one page to look at, and to send."""

from __future__ import annotations

from pathlib import Path

from sim.cli import console
from sim.cli.options import Flag, Overwrite, Quiet, claiming


@claiming("out")
def report(
    *directories: Path,
    out: Path = Path("report.html"),
    overwrite: Overwrite = False,
    static: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Write one page to look at and send: of runs, compared, a sweep or a plan.

    Parameters
    ----------
    directories
        What 'kvsim run', 'sweep' or 'plan' wrote; several runs are compared.
    out
        The page.
    static
        Draw the figures as SVG, also where plotly is installed: smaller, without zoom.
    """
    from sim.cli.output.plan import plan_reporter
    from sim.views.report import build_page
    from sim.views.report.build import check_page, write_page

    check_page(out, overwrite=overwrite)
    bar = console.progress_bar(plan_reporter, 1, "sections", shown=not quiet)
    with bar as on_section:
        text = build_page(directories, is_static=static, on_section=on_section)
    write_page(text, out, overwrite=overwrite)
    if not quiet:
        from sim.views.report.plotly_charts import has_plotly

        size = f"{len(text.encode()) / 1e6:.1f} MB"
        how = "interactive"
        if static:
            how = "static figures"
        elif not has_plotly():
            how = "static figures; pip install 'kvsim[report]' for zoom and hover"
        print(f"{out} ({size}, {how})")
        if len(directories) > 1:
            from sim.results.folder import RunFolder
            from sim.results.summary.compared import compared_lines
            from sim.views.report.source import labels

            folders = [RunFolder(each) for each in directories]
            configs = [each.config for each in folders]
            summaries = [each.summary for each in folders]
            for line in compared_lines(labels(directories), configs, summaries):
                print(line)
    return 0
