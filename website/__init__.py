"""The documentation site: gathers the pages of docs/ and those that are generated in build/pages, for mkdocs.yml."""
