"""Ready-made Mixture-of-Experts work: built-in graphs, routing, inputs. Import the modules by name; not all need torch."""
