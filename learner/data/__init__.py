"""Datasets: reading rows, turning them into prompts, and the deterministic order in which they are rolled out.

Names are imported from the modules: the files of a source are looked for by programs that read none of them.
"""
