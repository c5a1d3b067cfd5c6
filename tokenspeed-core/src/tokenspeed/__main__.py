"""`python -m tokenspeed`: the command line, of exactly this interpreter."""

from tokenspeed.cli.main import main

main()
