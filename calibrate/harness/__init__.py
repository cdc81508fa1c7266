"""Timing of kernels: what is measured, in which order, and how it survives a kill.

===============  ======================================================================
`geometry`       shapes of a model's operations on one rank `grid`           the points
of each preset `plan`           order of visits, sentinels, points added where
neighbours disagree `device`         what a device must offer; `dry_run` and
`calibrate.gpu` are devices `checkpoint`     finished blocks on disk `outcome`
what is asked, how far it is, what was found `session`        warm-up and sampling of
points, from the gate to the last block `output`         the profile: tables, and what
it says about how it came to be `command`        files, progress and exit of ``kvsim
calibrate`` `summary`        what is shown at the end: anchors, physical limits,
stability ===============
======================================================================
"""
