"""Phase 3: SGLang's own classes and ours side by side. Needs what `nox -s phase3` installs."""
