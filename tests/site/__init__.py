"""Pages of the documentation site that are generated from the code.

``mkdocs.yml`` names ``hook.py``, which adds the pages to a build. The other modules
return Markdown and have no mkdocs in them. Begin with ``hook.py``.
"""
