"""What a run folder shows to a person: the page, the README picture, and tables."""

from marlhf.report.page import build_report
from marlhf.report.picture import write_curve_picture
from marlhf.report.table import Table, rich_table

__all__ = ["Table", "build_report", "rich_table", "write_curve_picture"]
