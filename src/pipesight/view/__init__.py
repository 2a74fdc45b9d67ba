"""Findings as terminal text, JSON and pages. Views draw what analysis found and compute nothing of their own."""
