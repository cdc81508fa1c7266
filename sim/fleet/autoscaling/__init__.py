"""Autoscalers: how many replicas a pool has as its traffic comes and goes."""
