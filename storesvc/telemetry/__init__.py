"""Events of the service, and their projections to metrics, spans and log records.

Layers publish what happened (``events``), and know no receiver. Metrics
(``prometheus``), spans (``spans``) and log records (``json_log``) are computed from
these events alone, so they cannot disagree. Imports nothing of the service; only the
server subscribes. Begin with ``events``.
"""
