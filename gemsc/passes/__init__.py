"""The passes, one idea a file; `gemsc.compiler` puts them in order."""

if __name__ != "gemsc.passes":
    raise ImportError("import gemsc.passes; the folder passes/ is a link to it")
