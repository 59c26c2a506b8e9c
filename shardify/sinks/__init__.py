"""Where finished files go: a folder."""
