"""Usage and invoices as files: CSV, JSON lines, Parquet, FOCUS, HTML and PDF."""

__all__ = [
    "export_file",
    "export_folders",
    "export_parquet",
    "focus",
    "invoice_document",
    "invoice_pdf",
    "usage_export",
]
