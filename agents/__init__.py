"""Agents that learn where to cut, and the programs that train and measure them."""
