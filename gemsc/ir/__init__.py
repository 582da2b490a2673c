"""The intermediate representation: a traced graph and the facts found about it."""
