"""How large the bubble is, why, and what to change: tables in, a `Report` out."""
