"""One plugin: is it written for this Nonet, and what does it provide?"""
