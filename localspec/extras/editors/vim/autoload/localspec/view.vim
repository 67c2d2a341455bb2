" Ghost text: text properties in Vim, extmarks in Neovim; and windows that wait until nobody types.

" Show `lines` at a byte column (from 0) of a buffer's line: the first in the line, the others below it.
function! localspec#view#draw(buffer, lnum, column, lines) abort
  let before = strpart(getbufline(a:buffer, a:lnum)[0], 0, a:column)
  let shown = [s:shown(a:lines[0], strdisplaywidth(before))]
        \ + map(a:lines[1:], {_, line -> s:shown(line, 0)})
  call localspec#view#erase(a:buffer)
  if has('nvim')
    call s:nvim(a:buffer, a:lnum, a:column, shown)
  else
    call s:vim(a:buffer, a:lnum, a:column, shown)
  endif
endfunction

function! s:nvim(buffer, lnum, column, shown) abort
  let mark = {'hl_mode': 'combine', 'virt_text': [[a:shown[0], 'LocalspecGhost']],
        \ 'virt_text_pos': has('nvim-0.10') ? 'inline' : 'overlay',
        \ 'virt_lines': map(a:shown[1:], {_, line -> [[line, 'LocalspecGhost']]})}
  let after = strpart(getbufline(a:buffer, a:lnum)[0], a:column)
  if !has('nvim-0.10') && !empty(after)
    call add(mark.virt_text, [s:shown(after, 0), 'Normal'])
  endif
  call nvim_buf_set_extmark(a:buffer, nvim_create_namespace('localspec'), a:lnum - 1, a:column, mark)
endfunction

function! s:vim(buffer, lnum, column, shown) abort
  if empty(prop_type_get('localspec'))
    call prop_type_add('localspec', {'highlight': 'LocalspecGhost'})
  endif
  let prop = {'type': 'localspec', 'bufnr': a:buffer}
  if !empty(a:shown[0])
    call prop_add(a:lnum, a:column + 1, extend({'text': a:shown[0]}, prop))
  endif
  for line in a:shown[1:]
    call prop_add(a:lnum, 0, extend({'text': empty(line) ? ' ' : line, 'text_align': 'below'}, prop))
  endfor
  call s:redraw(a:buffer)
endfunction

" Show that `count` lines from `lnum` on become `lines`: the old ones marked, the new ones below them.
function! localspec#view#change(lnum, count, lines) abort
  let shown = map(copy(a:lines), {_, line -> s:shown(line, 0) .. ' '})
  let [below, above] = [max([a:lnum + a:count - 1, 1]), a:lnum + a:count == 1]
  if has('nvim')
    let space = nvim_create_namespace('localspec')
    for lnum in range(a:lnum, a:lnum + a:count - 1)
      call nvim_buf_set_extmark(0, space, lnum - 1, 0, {'end_row': lnum, 'hl_group': 'LocalspecOld', 'hl_eol': v:true, 'strict': v:false})
    endfor
    call nvim_buf_set_extmark(0, space, below - 1, 0, {'virt_lines_above': above ? v:true : v:false,
          \ 'virt_lines': map(shown, {_, line -> [[line, 'LocalspecNew']]})})
    return
  endif
  for [name, group] in [['localspec_old', 'LocalspecOld'], ['localspec_new', 'LocalspecNew']]
    if empty(prop_type_get(name))
      call prop_type_add(name, {'highlight': group})
    endif
  endfor
  for lnum in range(a:lnum, a:lnum + a:count - 1)
    call prop_add(lnum, 1, {'type': 'localspec_old', 'length': strlen(getline(lnum))})
  endfor
  for line in shown
    call prop_add(below, 0, {'type': 'localspec_new', 'text': line, 'text_align': above && has('patch-9.0.0438') ? 'above' : 'below'})
  endfor
  call s:redraw(bufnr())
endfunction

" Some versions of Vim (9.0.1378) forget that lines move when text comes or goes below a line. Restoring
" nothing of a window's view has its lines drawn again, without clearing the screen.
function! s:redraw(buffer) abort
  for window in filter(win_findbuf(a:buffer), {_, id -> win_id2win(id)})
    call win_execute(window, 'call winrestview({})')
  endfor
endfunction

" Take away all ghost text of a buffer.
function! localspec#view#erase(buffer) abort
  if !bufloaded(a:buffer)
    return
  elseif has('nvim')
    return nvim_buf_clear_namespace(a:buffer, nvim_create_namespace('localspec'), 0, -1)
  endif
  for name in filter(['localspec', 'localspec_old', 'localspec_new'], {_, name -> !empty(prop_type_get(name))})
    if prop_remove({'type': name, 'bufnr': a:buffer, 'all': 1})
      call s:redraw(a:buffer)
    endif
  endfor
endfunction

" A line as it may stand on the screen: tabs as wide as they would be from `column` on, and nothing that
" commands a terminal.
function! s:shown(text, column) abort
  let [shown, column] = ['', a:column]
  let parts = split(a:text, "\t", 1)
  for part in parts[:-2]
    let part = strtrans(part)
    let column += strdisplaywidth(part)
    let gap = &tabstop - column % &tabstop
    let shown ..= part .. repeat(' ', gap)
    let column += gap
  endfor
  return shown .. strtrans(parts[-1])
endfunction

" Call it once nobody types: a window that opens under one's keys takes them.
function! localspec#view#idle(call) abort
  if mode(1) !=# 'n' || getcmdwintype() !=# ''
    call timer_start(200, {_ -> localspec#view#idle(a:call)})
    return
  endif
  call a:call()
endfunction
