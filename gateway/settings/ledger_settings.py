"""Settings of bills and of the ledger behind them."""

from dataclasses import dataclass

from gateway.settings.base_settings import MIB, setting


@dataclass(frozen=True, kw_only=True)
class InvoiceSettings:
    """The currency, and what invoices say."""

    currency: str = setting(
        "USD", "Currency of prices and bills, as an ISO 4217 code.", pattern=r"\A[A-Z]{3}\Z"
    )
    currency_decimals: int = setting(
        2, "Decimal places of the amounts on an invoice, such as 2 for cents.", ge=0, le=9
    )
    invoice_issuer: str = setting(
        "Polyhost",
        "Name of the issuer, shown on invoices and in FOCUS exports. One line.",
        pattern=r"\A[^\x00-\x1f\x7f]+\Z",
    )
    invoice_details: str = setting(
        "",
        "More about the issuer, shown on invoices: address, bank account, tax number. May have "
        "several lines.",
    )
    invoice_prefix: str = setting(
        "INV-", "Text before the number of an invoice.", pattern=r"\A[A-Za-z0-9._-]{0,16}\Z"
    )
    invoice_font: str = setting(
        "",
        "Path of a TrueType font for PDF invoices. Needed for names with characters outside the "
        "Latin alphabet.",
    )
    invoice_tax_name: str = setting(
        "", "Name of the tax that invoices add to the net amount. Empty: no tax."
    )
    invoice_tax_bp: int = setting(
        0, "Tax rate in basis points: 1900 is 19 percent.", ge=0, le=10_000
    )


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """When usage is durable, and how much of it may wait."""

    ledger_flush_interval_s: float = setting(
        0.002,
        "Minimum time between two syncs of the journal. Under load, one sync covers many requests.",
        ge=0,
    )
    ledger_sync_interval_s: float = setting(
        0.05,
        "Maximum time until the record of a finished request is synced to disk. Until then it "
        "survives a killed process but not a power failure.",
        ge=0,
    )
    ledger_max_pending: int = setting(
        10_000,
        "Maximum number of records that are not yet durable. Beyond it, new requests get 503.",
        ge=1,
    )
    ledger_open_timeout_s: float = setting(
        10.0,
        "How long a request may wait until its opening record is durable. After that it gets 503.",
        gt=0.0,
    )
    ledger_checkpoint_tokens: int = setting(
        64,
        "Number of streamed tokens between two checkpoints. If gateway and worker are both "
        "killed, at most this many tokens of a stream are not billed.",
        ge=1,
    )
    ledger_recovery_wait_s: float = setting(
        3.0,
        "How long the server waits at startup for workers to report the usage of requests from "
        "before the restart.",
        ge=0,
    )
    ledger_max_batch: int = setting(
        1000, "Approximate maximum number of records in one database transaction.", ge=1
    )
    ledger_write_interval_s: float = setting(
        0.2, "Pause between two database transactions when few records arrive.", ge=0
    )
    ledger_rollup_interval_s: float = setting(
        5.0, "How often new postings are added to the roll-ups. 0: never.", ge=0
    )
    journal_segment_bytes: int = setting(
        8 * MIB,
        "Size of one journal file; two are allocated in advance. An open request takes 1280 "
        "bytes of a file, so this also limits the number of open requests; further requests get "
        "503.",
        ge=65_536,
    )
    journal_max_bytes: int = setting(
        1024 * MIB,
        "Maximum size of journal records not yet in the database. Beyond it, new requests get "
        "503. A request takes about one kilobyte.",
        ge=1,
    )
    journal_min_free_bytes: int = setting(
        64 * MIB, "Minimum free space on the journal's disk. Below it, new requests get 503.", ge=0
    )
