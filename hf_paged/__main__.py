"""`python -m hf_paged`."""

from hf_paged.tools.cli import main

if __name__ == "__main__":
    main()
