"""JSON schemas made simple before a grammar is compiled from them (R7.3): `core.grammar.schema.normalise`."""
