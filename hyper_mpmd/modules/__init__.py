"""Ready-made Mixture-of-Experts work: built-in graphs, routing, inputs. Not all of it needs torch."""
