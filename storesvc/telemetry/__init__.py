"""Events of the service, and their projections to metrics and spans.

Layers publish what happened (``events``), and know no receiver. Metrics
(``prometheus``) and spans (``spans``) are computed from these events alone, so they
cannot disagree. Imports nothing of the service; only the server subscribes. Begin with
``events``.
"""
