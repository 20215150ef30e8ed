"""What MkDocs calls: it adds the reference and the files that documents link to, and rewrites links."""

from __future__ import annotations

import logging

from drawings import with_columns, with_pictures
from durations_page import duration_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from names import name_tables
from pages import ROOT, complete_nav, is_source, outside, page_of, python_markdown, source_page, with_page_links
from reference import module_list, public_modules

_LOG = logging.getLogger("mkdocs.hooks.choros")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not files below ``docs``, and all pages to the navigation."""
    documents = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for module in public_modules():
        files.append(File.generated(config, module.page, content=module.text))
    for path in sorted(outside(documents)):
        if is_source(path):
            source = File.generated(config, page_of(path), content=source_page(path))
            source.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(source)
        else:
            files.append(File.generated(config, page_of(path), abs_src_path=str(ROOT / path)))
    pages = [file.src_uri for file in files.documentation_pages() if not file.inclusion.is_not_in_nav()]
    config.nav = complete_nav(config.nav or [], pages)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites a document for the site."""
    path = page.file.src_uri
    file = path if (ROOT / path).is_file() else f"docs/{path}"
    added = module_list() if path == "reference/index.md" else name_tables(path) + duration_tables(path)
    return with_pictures(python_markdown(with_page_links(file, markdown))) + added


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warns if a public name is not on its page; says how wide drawings are."""
    for module in public_modules():
        if page.file.src_uri == module.page and (missing := module.missing(html)):
            _LOG.warning("%s lacks %s", module.page, ", ".join(missing))
    return with_columns(html)
