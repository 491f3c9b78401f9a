// The box view: filled while it is shown.

export function startBox(root, api) {
  root.textContent = "";
}

export function stopBox() {}
