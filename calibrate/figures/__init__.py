"""Figures of a profile: measured against fitted, on the roofline, and what is covered.

Each is a function that returns a matplotlib figure in the style of
`sim.views.plots.style`, byte for byte the same for the same profile; `draw_profile`
writes them. pyplot is never touched.

To add a figure: write such a function in a file of its own and call it in
`calibrate.figures.drawing`. A new operation needs its axes in `calibrate.figures.axes`.
"""
