"""Fair shares, placement, costs of service and loads, histories of models, reasons. Pure."""

__all__ = [
    "fair_share",
    "fleet_sight",
    "fleet_view",
    "placement",
    "prefix_places",
    "reasons",
    "relief",
    "service_costs",
]
