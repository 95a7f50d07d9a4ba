"""How an argument is declared, parsed and explained."""
