"""The main job, end to end: a training run that is killed and goes on elsewhere.

``storectl demo`` runs it (`job`). It starts a store server and four training
processes (`train`), each with eight CPU devices; judges what they printed
(`claims`); and shows the loss curves (`curves`) and what `storectl` says about the
checkpoints. The processes speak in lines of JSON (`job_log`).
"""
