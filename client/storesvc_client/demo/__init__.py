"""Runs the main job, end to end: training that is killed and resumes elsewhere.

``storectl demo`` runs it (`job`). It starts a store server and four training
processes (`train`), each with eight CPU devices; checks their output, and shows the
loss curves and the output of `storectl` for the checkpoints. The processes print lines
of JSON (`processes`).
"""
