"""`python -m tapernorm` is the command line."""

from tapernorm.cli import main

if __name__ == "__main__":
    main()
