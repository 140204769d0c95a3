const button = document.getElementById("copy"), command = document.getElementById("command");
button.hidden = false;
button.addEventListener("click", async () => {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(command.textContent);
  } catch { /* not allowed, or not there: select it, and ask the browser in the older way */
    getSelection().selectAllChildren(command);
    isCopied = document.execCommand("copy");
  }
  document.getElementById("copied").textContent = isCopied ? "Copied." : "Selected: press Ctrl+C or ⌘C to copy.";
});
