"""Figures, pages and exports of results."""
