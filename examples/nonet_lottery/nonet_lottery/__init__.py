"""A lottery scheduler for Nonet, as a package of its own."""
