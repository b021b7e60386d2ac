"""Each module is a plugin that cannot be used, but for `heavy`, which only should be mended."""
